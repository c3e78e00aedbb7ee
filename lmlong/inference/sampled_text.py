"""Text sampled from a model, as tokens: for measurements where no other text is available."""

import torch
from torch import Tensor
from tqdm import tqdm

from lmlong.inference.loading import TrainedLanguageModel
from lmlong.inference.sampling import Sampler
from lmlong.model.sampling_options import Sampling


@torch.inference_mode()
def sampled_text(loaded: TrainedLanguageModel, rows: int, tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Sample tokens (rows, tokens) at temperature 1, document after document; return them and the document starts."""
    device = loaded.model.embedding.weight.device
    sampler = Sampler(Sampling(temperature=1.0, loop_penalty=0, seed=seed), [(row,) for row in range(rows)])
    token = torch.full((rows,), loaded.tokenizer.bos, device=device)
    written, state = [], None
    for _ in tqdm(range(tokens), unit="token", leave=False, disable=None, desc="writing"):
        written.append(token)
        logits, state = loaded.model(token[:, None], state, token[:, None] == loaded.tokenizer.bos)
        ended = token == loaded.tokenizer.eos
        token = torch.where(ended, loaded.tokenizer.bos, sampler(logits[:, 0]).to(device))
    text = torch.stack(written, dim=1).clone()
    return text, text == loaded.tokenizer.bos
