"""MB that a step of 16k tokens in segments of 2,048 holds beyond the model; a program, since a peak is of a process."""

import resource

import torch

from lmlong import recipe
from lmlong.model.language_model import LanguageModel
from lmlong.model.segments import text_loss


def step(model: LanguageModel, tokens: torch.Tensor, segment: int) -> None:
    nll, _ = text_loss(model, tokens, tokens.roll(-1, 1), segment=segment)
    (nll / tokens.numel()).backward()


def resident() -> int:
    """Return the bytes that this process holds now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    options = recipe.Model(width=128, layers=4, heads=4, attention=recipe.Attention(kind="linear"))
    model = LanguageModel(options, 1024)
    tokens = torch.randint(1024, (1, 16_384), generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        step(model, tokens[:, :64], 32)  # a first step allocates what all need
        before = resident()
        step(model, tokens, 2048)
    print(f"{(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before) / 1e6:.0f}")
