"""The speed of whole models: a training step by each kernel, and decoding with and without a fast step."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from gpu_report_parts.kernels import WrongError
from gpu_report_parts.part import Job, LeftOutError, figures, lines, measure
from lmlong import recipe
from lmlong.attention import laws
from lmlong.bench.candidates import GENERATED, GenerationCandidates, training_candidate
from lmlong.bench.speed import Candidate, Result
from lmlong.inference.session import append_token, next_logits, prefill
from lmlong.model.fast_step import why_no_fast_step
from lmlong.model.language_model import LanguageModel
from lmlong.recipe import file as recipe_file

LINEAR = "elu-learned"
"""The recipes' own attention."""

AGREES = 3e-2
"""How far losses, norms of gradients and logits may be from those of torch's operations in the same format."""

COMPARED = 4
"""Tokens whose logits are compared."""


def load(job: Job, *overrides: str) -> recipe.Recipe:
    return recipe_file.load(job.sizes.recipe, [*job.sizes.overrides, *overrides])


def name_model(job: Job) -> str:
    options = load(job)
    size = f"{options.model.layers} layers of width {options.model.width}"
    return f"the recipe `{job.sizes.recipe}` ({size}, vocabulary {options.text.tokenizer.vocabulary:,})"


def training(job: Job) -> None:
    """Measure training steps on one row of text."""
    results: list[Result] = []
    for length in job.sizes.train_lengths:
        results += measure(job, "a training step", length, training_steps(job, length), results)
        job.found.lines = [
            f"A whole step of {name_model(job)}, on one row of random",
            "tokens in bfloat16: forward and backward pass, clipping, AdamW. MB are those held beside weights and",
            "AdamW's moments.",
            "",
            *lines(results),
        ]
        job.found.figures = figures(results)
        job.found.save()


def training_steps(job: Job, length: int) -> dict[str, Callable[[], Candidate]]:
    """Return how each step is made ready; one whose numbers are not those by torch's operations is refused."""
    by_torch: list[Tensor] = []

    def step(name: str, kernel: str) -> Candidate:
        one = training_candidate(name, "bf16", length, load(job, f"training.kernel={kernel}"), job.device)
        loss_and_norm = one.call()
        assert isinstance(loss_and_norm, Tensor)
        if kernel == "torch":
            by_torch.append(loss_and_norm)
        if kernel == "triton":
            if not by_torch:
                raise LeftOutError("there is no step by torch's operations to compare its numbers with")
            if not (off := float((loss_and_norm / by_torch[0] - 1).abs().max())) <= AGREES:
                raise WrongError(f"loss or gradient are {off:.1e} from those by torch's operations")
        return one

    linear = {f"{LINEAR} by {kernel}": partial(step, LINEAR, kernel) for kernel in ("torch", "triton")}
    return {"softmax": partial(step, "softmax", "auto"), **linear}


def decode(job: Job) -> None:
    """Measure how fast one text is continued, by torch's operations and by the fast step."""
    fast = "CUDA graph" if job.device.type == "cuda" else "native code"
    makers = {
        "softmax": partial(generation, job, "softmax", False),
        LINEAR: partial(generation, job, LINEAR, False),
        f"{LINEAR}, {fast}": partial(generation, job, LINEAR, True),
    }
    results = measure(job, "decoding", job.sizes.prompt, makers, [])
    instead = "" if fast == "CUDA graph" else ", for there is no CUDA graph on a CPU"
    job.found.lines = [
        f"{GENERATED} tokens of one text after {job.sizes.prompt:,}, by {name_model(job)}, weights in bfloat16:",
        f"by torch's operations one by one, and by {fast} a token at a time{instead}.",
        "MB are those of the state and of what is made on the way.",
        "",
        *lines(results),
    ]
    job.found.figures = figures(results)


def generation(job: Job, name: str, fast: bool) -> Candidate:
    """Return the generation of some tokens; a fast step whose logits are not those by torch is refused."""
    made = GenerationCandidates(load(job), job.device, fast)
    model = made.model(name, "bf16")
    if fast and (why := why_no_fast_step(model)):
        raise LeftOutError(why)
    if fast and not (off := logits_error(model, job.sizes.prompt)) <= AGREES:
        raise WrongError(f"the logits are {off:.1e} from those by torch's operations")
    return made.candidate(name, "bf16", job.sizes.prompt)


@torch.inference_mode()
def logits_error(model: LanguageModel, prompt: int) -> float:
    """Return how far the logits of the first tokens by the fast step are from those by torch."""
    session, worst = prefill(model, [list(range(prompt))]), 0.0
    for _ in range(COMPARED):
        usual, _ = model.decode_step(session.last, session.state, None)
        logits, state = next_logits(model, session)
        worst = max(worst, laws.error(logits, usual))
        session = append_token(session, state, usual.argmax(-1))
    return worst
