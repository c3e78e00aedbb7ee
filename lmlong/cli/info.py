"""`lmlong info`: describe this installation, or a run."""

import platform
import textwrap
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lmlong.cli import options
from lmlong.cli.output import show
from lmlong.cli.runs import near

if TYPE_CHECKING:
    from lmlong.inference.loading import TrainedModel
    from lmlong.model.base import TextModel

WIDTH = 80
PACKAGES = ("lmlong", "torch", "lightning", "deepspeed", "sentencepiece")


@click.command()
@options.any_run
@options.threads
@options.json_file
def info(run: str | None, json_file: Path | None) -> None:
    """Describe this installation or, with RUN, a trained model.

    \b
    Example: the installation, then a run.
      lmlong info
      lmlong info runs/quickstart --json
    """
    facts = _run(run) if run is not None else _installation()
    shown = {name: near(value) if name == "checkpoint" else value for name, value in facts.items()}
    show(_lines(shown), facts, json_file)


def _installation() -> dict[str, Any]:
    import torch

    from lmlong.attention.linear.native import library
    from lmlong.model.device import pick_device
    from lmlong.model.precision import computes_in_bf16
    from lmlong.native.build import find_compiler

    device = pick_device("auto")
    return {
        "python": platform.python_version(),
        **{package: _version(package) for package in PACKAGES},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "computes in bf16": computes_in_bf16(device),
        "C++ compiler": find_compiler(),
        "native code": library() is not None,
    }


def _run(run: str) -> dict[str, Any]:
    from lmlong.inference.loading import CACHE_DTYPE, open_run
    from lmlong.model.base import count_parameters
    from lmlong.model.language_model import LanguageModel
    from lmlong.model.state_size import state_size
    from lmlong.recipe import ATTENTION_KINDS
    from lmlong.training.metrics_log import last_validation

    loaded = open_run(run, "cpu")
    step, model, layers = loaded.step, loaded.recipe.model, range(loaded.recipe.model.layers)
    state = learning = None  # an encoder has none
    if isinstance(loaded.model, LanguageModel):
        loaded.model.set_cache_dtype(CACHE_DTYPE)
        state, learning = (state_size(loaded.model, learn) for learn in (None, "output"))
    window = model.attention.parallel_window
    beside = state and any(ATTENTION_KINDS[kind].recurrent for kind in model.kinds)
    return {
        "name": loaded.recipe.name,
        "objective": loaded.recipe.objective,
        "checkpoint": str(loaded.checkpoint),
        "step": step,
        "trained tokens": loaded.trained_tokens,
        "trained length": loaded.recipe.text.sequence_length,
        **({"trained from states": "of the text before"} if loaded.recipe.training.carry_state else {}),
        **({"trained from states": "of other texts"} if loaded.recipe.training.state_passing else {}),
        "parameters": count_parameters(loaded.model),
        "number format": str(loaded.model.embedding.weight.dtype).removeprefix("torch."),
        "vocabulary": loaded.tokenizer.vocabulary,
        "attention by layer": model.kinds,
        **({"window beside": window} if window and beside else {}),
        **({"plug-ins": loaded.recipe.plugins} if loaded.recipe.plugins else {}),
        "tokens read as one by layer": [model.factor if at in model.downsampled_layers else 1 for at in layers],
        **_decoding(loaded.model),
        **_kernels(loaded),
        **({"state bytes": state.empty.bytes, "state bytes per token": state.per_token.bytes} if state else {}),
        **({"state bytes with --learn": learning.empty.bytes} if learning else {}),
        **_state_health(loaded.checkpoint, step),
        "validation": last_validation(_entries(loaded.checkpoint, step)),
    }


def _decoding(model: "TextModel") -> dict[str, str]:
    """Return which implementation decodes the model; empty for an encoder."""
    from lmlong.model.fast_step import why_no_fast_step
    from lmlong.model.language_model import LanguageModel

    if not isinstance(model, LanguageModel):
        return {}
    why = why_no_fast_step(model)
    return {"decoded by": "native code" if why is None else f"torch ({why.rstrip('.')})"}


def _kernels(loaded: "TrainedModel") -> dict[str, Any]:
    """Return the kernels of the run and of this machine, by kinds of attention; empty if the model has none."""
    from lmlong.inference.loading import reading_work
    from lmlong.model.device import pick_device
    from lmlong.model.kernel_choice import kernels_here
    from lmlong.model.language_model import LanguageModel

    model, trained, device = loaded.model, loaded.kernels, pick_device("auto")
    if not isinstance(model, LanguageModel) or not model.with_kernels:
        return {}
    here = kernels_here(model, reading_work("32"), device, trained)
    reasons = {
        f"{kind} by {kernel}": why
        for kind, attentions in model.with_kernels.items()
        for kernel, why in attentions[0].kernel_reasons(device).items()
        if why
    }
    return {
        **({"trained by kernels": trained.names, "kernels chosen by": trained.chosen_by} if trained else {}),
        "kernels here": {kind: kernel or "by a trial" for kind, kernel in here.items()},
        **({"kernels not usable here": reasons} if reasons else {}),
    }


def _state_health(checkpoint: Path, step: int | None) -> dict[str, Any]:
    """Return the state health of each recurrent layer at that validation."""
    entries = [entry["state"] for entry in _entries(checkpoint, step) if isinstance(entry.get("state"), list)]
    named = {"effective memory by head": "effective_memory", "smallest denominators": "smallest_denominator"}
    values = {
        name: {f"layer {numbers['layer']}": numbers[key] for numbers in entries[-1] if key in numbers}
        for name, key in (named if entries else {}).items()
    }
    return {name: layers for name, layers in values.items() if layers}


def _entries(checkpoint: Path, step: int | None) -> list[dict[str, Any]]:
    """Return the metrics of a checkpoint's run up to its step."""
    from lmlong.training.metrics_log import read_entries

    return [entry for entry in read_entries(checkpoint.parents[1] / "metrics.jsonl") if entry["step"] <= (step or 0)]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _lines(facts: dict[str, Any]) -> str:
    """Format facts as lines of up to 80 columns; a longer path is not broken."""
    width = max(map(len, facts)) + 2
    return "\n".join(_wrapped(f"{name:<{width}}", _words(value)) for name, value in facts.items())


def _wrapped(name: str, value: str) -> str:
    lines = textwrap.wrap(value, WIDTH - len(name), break_long_words=False, break_on_hyphens=False)
    return "\n".join(f"{name if number == 0 else '':<{len(name)}}{line}" for number, line in enumerate(lines or [""]))


def _words(value: Any) -> str:
    """Format a value for people."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4f}"
    if isinstance(value, list) and any(isinstance(part, float) for part in value):
        return " ".join("-" if part is None else f"{part:,.4g}" for part in value)
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, dict):
        # a colon after a name of several words, whose end would not be seen
        words = {name.replace("_", " "): _words(part) for name, part in value.items()}
        return ", ".join(f"{name}: {part}" if " by " in name else f"{name} {part}" for name, part in words.items())
    return str(value)
