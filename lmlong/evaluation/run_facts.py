"""The facts of a run: its size, training, kernels, state and last validation."""

from pathlib import Path
from typing import Any

from lmlong.decode.choice import describe_engine
from lmlong.inference.loading import CACHE_DTYPE, TrainedLanguageModel
from lmlong.inference.trained_model import TrainedModel
from lmlong.model.base import count_in_tables, count_parameters
from lmlong.model.device import pick_device
from lmlong.model.kernel_check import usable_kernel
from lmlong.model.language_model import LanguageModel
from lmlong.model.state_size import state_size
from lmlong.recipe.training import format_name
from lmlong.training.metrics_log import METRICS_FILE, last_validation, read_entries


def run_facts(loaded: TrainedModel) -> dict[str, Any]:
    """Return what `lmlong info` prints of a run: names and plain values. Sets the dtype of the caches of the model."""
    step, model, layers = loaded.step, loaded.recipe.model, range(loaded.recipe.model.layers)
    state = learning = None  # only a language model has them
    if isinstance(loaded, TrainedLanguageModel):
        loaded.model.set_cache_dtype(CACHE_DTYPE)
        state, learning = (state_size(loaded.model, learn) for learn in (False, True))
    window, precision = model.window_beside if state else None, loaded.recipe.training.precision
    return {
        "name": loaded.recipe.name,
        "objective": loaded.recipe.objective,
        **({"labels": labels} if (labels := loaded.recipe.label_names) else {}),
        "checkpoint": str(loaded.checkpoint),
        "step": step,
        "trained tokens": loaded.trained_tokens,
        "trained length": loaded.recipe.text.sequence_length,
        **({"trained from states": "of the text before"} if loaded.recipe.training.carry_state else {}),
        **({"trained from states": "of other texts"} if loaded.recipe.training.state_passing else {}),
        "parameters": count_parameters(loaded.model),
        **({"in tables of n-grams": tables} if (tables := count_in_tables(loaded.model)) else {}),
        "weights stored in": str(loaded.model.embedding.weight.dtype).removeprefix("torch."),
        **({"training computed in": format_name(precision)} if precision != "auto" else {}),  # of an import
        "vocabulary": loaded.tokenizer.vocabulary,
        "attention by layer": model.kinds,
        **({"heads by kind": {kind: model.of_kind(kind).heads for kind in model.kinds}} if model.mixers else {}),
        **({"window beside": window} if window else {}),
        **({"n-gram heads added to layers": model.add_ngram} if model.add_ngram else {}),
        **({"plug-ins": loaded.recipe.plugins} if loaded.recipe.plugins else {}),
        "tokens read as one by layer": [model.factor if at in model.downsampled_layers else 1 for at in layers],
        **({"decoded by": describe_engine(loaded.model)} if isinstance(loaded, TrainedLanguageModel) else {}),
        **_kernels(loaded),
        **({"learns by default": loaded.recipe.learn} if state else {}),
        **({"state bytes": state.empty.bytes, "state bytes per token": state.per_token.bytes} if state else {}),
        **({"state bytes with --learn": learning.empty.bytes} if learning else {}),
        "validation": last_validation(metrics(loaded.checkpoint, step)),
    }


def _kernels(loaded: TrainedModel) -> dict[str, Any]:
    """Return the kernels of this machine, by kinds of attention; empty if the model has none."""
    model, device = loaded.model, pick_device("auto")
    if not isinstance(model, LanguageModel) or not model.with_kernels:
        return {}
    here = {kind: usable_kernel(attentions[0], device) for kind, attentions in model.with_kernels.items()}
    reasons = {
        f"{kind} by {kernel}": why
        for kind, attentions in model.with_kernels.items()
        for kernel, why in attentions[0].kernel_reasons(device).items()
        if why and here[kind] == "torch"  # so a faster one is missed
    }
    return {
        "kernels here": here,
        **({"kernels not usable here": reasons} if reasons else {}),
    }


def metrics(checkpoint: Path, step: int | None) -> list[dict[str, Any]]:
    """Return the metrics of a checkpoint's run up to its step."""
    return [entry for entry in read_entries(checkpoint.parents[1] / METRICS_FILE) if entry["step"] <= (step or 0)]
