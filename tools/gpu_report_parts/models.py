"""Whole models: training steps, decoding, and the losses of a run on a GPU beside those on a CPU."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache, partial
from itertools import product as pairs
from pathlib import Path
from typing import Any

import torch

from gpu_report_parts.measure import LeftOutError, Sizes, Work
from lmlong.attention import laws
from lmlong.bench.candidates import GENERATED, GenerationCandidates, build_model, training_candidate
from lmlong.bench.timer import peak_bytes, quartiles, time_rounds
from lmlong.decode.choice import why_no_fast_engine
from lmlong.decode.engine import engine_of
from lmlong.inference.session import append_token, next_logits, prefill
from lmlong.model.base import training_operations
from lmlong.model.device import peak_operations
from lmlong.model.language_model import LanguageModel
from lmlong.recipe import Recipe
from lmlong.recipe import file as recipe_file
from lmlong.recipe.lengths import name_length

ROOT = Path(__file__).resolve().parents[2]

COMPILED_STEP = "compiled CUDA graph"

COMPILED, KEPT = "training.compile=true", "training.activation_checkpointing=false"

STEPS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("elu-learned", "auto", (COMPILED, KEPT)),
    ("elu-learned", "auto", (KEPT,)),
    ("elu-learned", "auto", (COMPILED,)),
    ("delta", "auto", (COMPILED, KEPT)),
    ("softmax", "auto", (COMPILED, KEPT)),
    ("elu-learned", "auto", ()),
    ("delta", "auto", (KEPT,)),
)
"""Attentions, kernels and more overrides of the training steps."""

AGREES = 3e-2
"""Relative error of logits, and of the mean loss of the last steps, that bf16 and another order of sums explain."""


def load(sizes: Sizes, *overrides: str) -> Recipe:
    return recipe_file.load(sizes.recipe, [*sizes.overrides, *overrides])


def training(sizes: Sizes, device: torch.device) -> Iterator[Work]:
    """Measure a matrix product, then training steps."""
    yield Work("a product of 8,192 x 8,192 matrices", "", partial(product, device))
    for length in sizes.train_lengths:
        for name, kernel, more in STEPS:
            row = ", ".join([name, f"kernel {kernel}", f"{name_length(length)} tokens", *more])
            yield Work(row, "", partial(step, name, kernel, more, length, sizes, device))


def product(device: torch.device) -> dict[str, float]:
    a, b = (torch.randn(2, 8192 if device.type == "cuda" else 256, 8192, device=device)).bfloat16()
    seconds = quartiles(time_rounds({"": lambda: a @ b.mT}, device, 0.0)[""])[1]
    return speed_of(2 * a.numel() * len(b), seconds, device)


def step(
    name: str, kernel: str, more: tuple[str, ...], length: int, sizes: Sizes, device: torch.device
) -> dict[str, Any]:
    """Return the speed of a training step."""
    recipe = load(sizes, f"training.kernel={kernel}", *more)
    operations = token_operations(name, sizes) * length
    candidate = training_candidate(name, "bf16", length, recipe, device)
    candidate.call()
    peak = peak_bytes(candidate.call, device)
    seconds = quartiles(time_rounds({"": candidate.call}, device, sizes.seconds)[""])[1]
    cells = {"tokens/s": length / seconds, "ms": 1e3 * seconds, **speed_of(operations, seconds, device)}
    return {**cells, "GB beside weights": peak / 1e9}


@cache
def token_operations(name: str, sizes: Sizes) -> int:
    return training_operations(build_model(name, load(sizes, "training.kernel=torch"), torch.device("cpu")))


def speed_of(operations: float, seconds: float, device: torch.device) -> dict[str, float]:
    """Return TFLOP/s, and the share of the GPU's peak if that is known."""
    rate, peak = operations / seconds, peak_operations(device)
    return {"TFLOP/s": rate / 1e12, **({"share of peak": rate / peak} if peak else {})}


TEXTS = (1, 64)
"""Texts that are continued at once."""


def decoding(sizes: Sizes, device: torch.device) -> Iterator[Work]:
    """Measure how fast texts are continued: by one operation a token, whose blocks torch.compile runs or does not, and
    by torch's operations."""
    fast = "CUDA graph" if device.type == "cuda" else "native code"
    for name, how in pairs(("elu-learned", "delta"), (COMPILED_STEP, fast, "torch's operations")):
        for texts in TEXTS if name == "elu-learned" else TEXTS[:1]:
            work = partial(decode, name, how, texts, sizes, device)
            yield Work(f"{name}, {texts} at once, by {how}", "", work)


def decode(name: str, how: str, texts: int, sizes: Sizes, device: torch.device) -> dict[str, float]:
    """Return the speed of generation; a fast engine whose logits are not those by torch is refused."""
    fast = how != "torch's operations"
    model = GenerationCandidates(load(sizes), device, fast).model(name, "bf16")
    if fast and (why := why_no_fast_engine(model)):
        raise LeftOutError(why)
    compiles = how == COMPILED_STEP
    if fast and not (error := logits_error(model, sizes.prompt, compiles)) <= AGREES:
        raise ArithmeticError(f"the logits are {error:.1e} from those by torch's operations")
    engine = engine_of(model)
    with torch.inference_mode():
        _, state = model(torch.arange(sizes.prompt, device=device)[None])
    rows = [engine.load(state) for _ in range(texts)]

    def generate() -> None:
        for token in range(GENERATED):
            engine.step(rows, [token] * texts)

    generate()  # captures the graph
    seconds = quartiles(time_rounds({"": generate}, device, sizes.seconds)[""])[1] / GENERATED
    return {"tokens/s": texts / seconds, "ms a step": 1e3 * seconds}


@torch.inference_mode()
def logits_error(model: LanguageModel, prompt: int, compiles: bool, tokens: int = 4) -> float:
    """Return how far the logits of the first tokens by the fast engine are from those by torch."""
    session, worst = prefill(model, [list(range(prompt))]), 0.0
    for _ in range(tokens):
        last = torch.tensor([session.last], device=session.state.position.device)
        model.step_is_compiled = False
        usual, *_ = model.decode_step(last, session.state)
        model.step_is_compiled = compiles
        logits, state = next_logits(model, session)
        worst = max(worst, laws.error(logits, usual))
        session = append_token(session, state, int(usual.argmax()))
    return worst


RECIPE = """
format: 1
text:
  sources: [{kind: files, paths: [%s]}]
  tokenizer: {kind: bytes}
  sequence_length: 512
  validation: {fraction: 0.3}
model: {width: 128, layers: 4, heads: 2, attention: {kind: [linear, delta]}}
training: {steps: %d, batch_size: 4, precision: "32", log_every: 1, validation_tokens: 1000}
"""


def losses(sizes: Sizes, device: torch.device) -> Iterator[Work]:
    yield Work("linear and delta layers", "", partial(compare_losses, sizes, device))


def compare_losses(sizes: Sizes, device: torch.device) -> dict[str, float]:
    """Train the same model on both devices at once, on the GPU also compiled, and return its losses."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "recipe.yaml"
        recipe.write_text(RECIPE % (ROOT / "lmlong" / "model", sizes.steps))
        name = "GPU" if device.type == "cuda" else "CPU again"
        runs = {name: [device.type], f"{name}, compiled": [device.type, COMPILED], "CPU": ["cpu"]}
        train = ["-m", "lmlong", "train", str(recipe)]
        processes = {
            name: subprocess.Popen(
                [sys.executable, *train, f"device={kind}", *more, "--out", f"{folder}/{name}"],
                stdout=subprocess.DEVNULL,
                cwd=folder,
            )
            for name, (kind, *more) in runs.items()
        }
        if failed := [name for name, process in processes.items() if process.wait()]:
            raise RuntimeError(f"the run on the {failed[0]} failed; see the log")
        found = {name: read_losses(Path(folder) / name / "metrics.jsonl") for name in runs}
    if any(len(losses) != sizes.steps for losses in found.values()):
        raise RuntimeError(f"steps of {sizes.steps}: {', '.join(f'{name} {len(of)}' for name, of in found.items())}")
    *mine, usual = found.values()
    shown = (1, len(usual) // 2, len(usual))
    cells = {f"{name}, step {step}": losses[step - 1] for step in shown for name, losses in found.items()}
    cells["largest difference"] = max(abs(a - b) for losses in mine for a, b in zip(losses, usual, strict=True))
    last = max(1, sizes.steps // 10)
    if any(not abs(sum(losses[-last:]) / sum(usual[-last:]) - 1) <= AGREES for losses in mine):
        raise ArithmeticError(f"the losses differ by up to {cells['largest difference']:.3f}")
    return cells


def read_losses(metrics: Path) -> list[float]:
    return [line["loss"] for line in map(json.loads, metrics.read_text().splitlines()) if "loss" in line]
