"""Constraints between the sections of a recipe: for a causal language model, and for an encoder."""

from collections.abc import Iterator
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from pydantic_core import PydanticCustomError

from lmlong.recipe.kinds import ATTENTION_KINDS
from lmlong.recipe.model import Model
from lmlong.recipe.section import mistake
from lmlong.recipe.text import Text
from lmlong.recipe.training import Training

ENCODER_DEFAULTS: dict[str, Any] = {"model": {"convolution": 0, "attention": {"kind": "linear", "decay": "none"}}}
"""Defaults of an encoder's recipe where those of a causal model do not fit."""

NO_CHOICE = "an encoder has no such choice"
NO_STATE = "an encoder reads its text at once, there is no state to pass on"
CAUSAL_ONLY = {
    "model.attention.decay": "an encoder sees all of its text at once and forgets none of it",
    "model.head_dim": "an encoder keeps no state, its heads share the width",
    "model.value_dim": "an encoder keeps no state, its heads share the width",
    "model.kv_heads": NO_CHOICE,
    "model.rope": NO_CHOICE,
    "model.output_gate": NO_CHOICE,
    "model.head_norm": NO_CHOICE,
    "model.embedding_scale": NO_CHOICE,
    "model.tied_output": NO_CHOICE,
    "model.convolution": "it sees the past alone, and an encoder looks at both sides",
    "training.segment": NO_STATE,
    "training.carry_state": NO_STATE,
    "training.state_passing": NO_STATE,
    "training.sample_tokens": "an encoder writes no text",
    "training.teacher": "an encoder has no teacher, which predicts next tokens",
}
"""Options that an encoder's recipe leaves at their defaults, and why."""

STATE_PASSING = ("carry_state", "state_passing")
"""Options of training that pass the state after a batch to the next batch."""


class Sections(NamedTuple):
    """The sections of a recipe that are compared."""

    text: Text
    model: Model
    training: Training


ENCODER = Sections(Text(), Model(**ENCODER_DEFAULTS["model"]), Training())


def disagreements(objective: Literal["causal", "masked"], sections: Sections) -> Iterator[PydanticCustomError]:
    """Iterate over the mistakes in combinations of sections."""
    model, is_encoder = sections.model, objective == "masked"
    for key, kind in _kinds_by_key(model):
        about = ATTENTION_KINDS[kind]
        if not (about.encoder if is_encoder else about.causal):
            yield mistake(key, about.misfit)
    uses_rope = model.positions in ("auto", "rotary") if is_encoder else model.uses_rope
    if uses_rope and model.head_dims.key % 2:
        key = "model.head_dim" if model.head_dim else "model.heads"
        why = f"queries of size {model.head_dims.key} cannot be rotated by rotary positions. Use an even size."
        yield mistake(key, why)
    yield from _masked(sections) if is_encoder else _causal(*sections)


def _kinds_by_key(model: Model) -> Iterator[tuple[str, str]]:
    """Iterate over the keys at which attentions are named, and their kinds."""
    kinds = model.attention.kind
    if isinstance(kinds, str):
        yield "model.attention.kind", kinds
    else:
        yield from ((f"model.attention.kind.{number}", kind) for number, kind in enumerate(kinds))


def _causal(text: Text, model: Model, training: Training) -> Iterator[PydanticCustomError]:
    if model.positions == "absolute":
        yield mistake("model.positions", "absolute positions end with the longest sequence. Use rotary, none or auto.")
    for key in ("segment", *STATE_PASSING):
        if getattr(training, key) and model.growing_kinds:
            yield mistake(
                f"training.{key}",
                f"the state of {' and '.join(model.growing_kinds)} attention grows with each token, so it cannot be "
                "passed on indefinitely. Leave this out, or let all layers be linear or window attention.",
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


def _masked(sections: Sections) -> Iterator[PydanticCustomError]:
    text, model, training = sections
    for key, why in CAUSAL_ONLY.items():
        option = attrgetter(key)
        if option(sections) != option(ENCODER):
            yield mistake(key, f"{why}. Leave it out.")
    if training.kernel == "triton":
        yield mistake("training.kernel", "the kernels read the past alone, and an encoder both sides. Leave it out.")
    longest = model.layer_lengths("linformer", text.sequence_length)
    if longest and (misfit := model.attention.linformer.misfit(longest, model.heads)):
        key, why = misfit
        if model.downsample:
            why += f" The layers in the middle read blocks of {model.factor} tokens (model.downsample)."
        yield mistake(f"model.attention.linformer.{key}", why)
