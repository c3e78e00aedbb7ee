"""Constraints between the sections of a recipe: for a causal language model, and for an encoder."""

from collections.abc import Iterator
from typing import Any, Literal

from pydantic_core import PydanticCustomError

from lmlong.recipe.kinds import ATTENTION_KINDS
from lmlong.recipe.model import Model
from lmlong.recipe.section import mistake
from lmlong.recipe.text import Text
from lmlong.recipe.training import Training

ENCODER_DEFAULTS: dict[str, Any] = {"model": {"convolution": 0, "attention": {"kind": "linear", "decay": "none"}}}
"""Defaults of an encoder's recipe where those of a causal model do not fit."""

CAUSAL_ONLY = ("kv_heads", "rope", "output_gate", "head_norm", "embedding_scale", "tied_output")
"""Options of a model that an encoder does not have."""

STATE_PASSING = ("carry_state", "state_passing")
"""Options of training that pass the state after a batch to the next batch."""


def causal(text: Text, model: Model, training: Training) -> Iterator[PydanticCustomError]:
    """Iterate over the mistakes of these sections for a causal language model."""
    yield from _unfit_kinds(model, "causal")
    yield from _odd_heads(model, model.uses_rope)
    if model.positions == "absolute":
        yield mistake("model.positions", "absolute positions end with the longest sequence. Use rotary, none or auto.")
    if model.state_growth != "constant":
        growing = " and ".join(model.growing_kinds)
        for key in ("segment", *STATE_PASSING):
            if getattr(training, key):
                yield mistake(
                    f"training.{key}",
                    f"the state of {growing} attention grows with each token, so it cannot be handed on for ever. "
                    "Leave this out, or let all layers be linear or window attention.",
                )
    if text.sequence_length % model.factor:
        yield mistake(
            "text.sequence_length",
            f"{text.sequence_length} is no multiple of model.downsample.factor, {model.factor}. "
            f"Use {-(-text.sequence_length // model.factor) * model.factor}.",
        )
    for key in STATE_PASSING:
        if getattr(training, key) and text.rows == "documents":
            yield mistake(f"training.{key}", "whole documents need nothing from the batch before. Leave it out.")
        if getattr(training, key) and model.attention.favor.resample_every:
            yield mistake(
                f"training.{key}",
                "features drawn anew make the states of the old ones meaningless. Leave this out, or resample_every.",
            )


def masked(text: Text, model: Model, training: Training) -> Iterator[PydanticCustomError]:
    """Iterate over the mistakes of these sections for an encoder."""
    yield from _unfit_kinds(model, "masked")
    yield from _odd_heads(model, model.positions in ("auto", "rotary"))
    if model.attention.decay != "none":
        yield mistake(
            "model.attention.decay", "an encoder sees all of its text at once and forgets none of it. Leave it out."
        )
    for key in ("head_dim", "value_dim"):
        if getattr(model, key):
            yield mistake(f"model.{key}", "an encoder keeps no state, its heads share the width. Leave it out.")
    for key in CAUSAL_ONLY:
        if getattr(model, key) != Model.model_fields[key].default:
            yield mistake(f"model.{key}", "an encoder has no such choice. Leave it out.")
    if model.convolution:
        yield mistake("model.convolution", "it sees the past alone, and an encoder looks at both sides. Leave it out.")
    for key in ("segment", *STATE_PASSING):
        if getattr(training, key):
            yield mistake(
                f"training.{key}", "an encoder reads its text at once, there is no state to hand on. Leave it out."
            )
    if training.sample_tokens:
        yield mistake("training.sample_tokens", "an encoder writes no text. Leave it out.")
    if training.teacher:
        yield mistake("training.teacher", "an encoder has no teacher, which predicts next tokens. Leave it out.")
    if training.kernel == "triton":
        yield mistake("training.kernel", "the kernels read the past alone, and an encoder both sides. Leave it out.")
    longest = model.layer_lengths("linformer", text.sequence_length)
    if longest and (misfit := model.attention.linformer.misfit(longest, model.heads)):
        key, why = misfit
        if model.downsample:
            why += f" The layers in the middle read blocks of {model.factor} tokens (model.downsample)."
        yield mistake(f"model.attention.linformer.{key}", why)


def _unfit_kinds(model: Model, objective: Literal["causal", "masked"]) -> Iterator[PydanticCustomError]:
    """Iterate over the mistakes of attentions that do not fit the objective, at their position in the pattern."""
    given = model.attention.kind
    places = {"": given} if isinstance(given, str) else {f".{place}": kind for place, kind in enumerate(given)}
    for place, kind in places.items():
        about = ATTENTION_KINDS[kind]
        if not (about.encoder if objective == "masked" else about.causal):
            yield mistake(f"model.attention.kind{place}", about.misfit)


def _odd_heads(model: Model, uses_rope: bool) -> Iterator[PydanticCustomError]:
    if uses_rope and model.head_dims.key % 2:
        key = "model.head_dim" if model.head_dim else "model.heads"
        why = f"queries of size {model.head_dims.key} cannot be rotated by rotary positions. Use an even size."
        yield mistake(key, why)
