"""Constraints between the sections of a recipe: for causal language models, encoders, and models that learn labels."""

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from pydantic_core import PydanticCustomError

from lmlong.recipe.kinds import ATTENTION_KINDS, why_misfit, why_state_grows
from lmlong.recipe.model import Model
from lmlong.recipe.section import mistake
from lmlong.recipe.text import ROW_LENGTHS, SHORT_PARTS, Text
from lmlong.recipe.training import Training

ENCODER_DEFAULTS: dict[str, Any] = {"model": {"convolution": 5, "attention": {"kind": "linear", "decay": "none"}}}
"""Defaults of an encoder that differ from those of a causal model."""

LABEL_DEFAULTS: dict[str, Any] = {"text": {"rows": "documents", "labels": {}}}
"""Defaults of objective: label that differ from those of the others."""

NO_CHOICE = "not supported by an encoder"
NO_STATE = "an encoder reads its text at once and passes on no state"
CAUSAL_ONLY = {
    "text.short_steps": "short sequences would be other positions and slots",
    "model.attention.decay": "an encoder sees all of its text at once and forgets nothing",
    "model.head_dim": "an encoder keeps no state, and its heads always have width / heads",
    "model.value_dim": "an encoder keeps no state, and its heads always have width / heads",
    "model.kv_heads": NO_CHOICE,
    "model.key_heads": NO_CHOICE,
    "model.input_gate": NO_CHOICE,
    "model.query_key_norm": NO_CHOICE,
    "model.norm": NO_CHOICE,
    "model.head_norm_epsilon": NO_CHOICE,
    "model.convolution_activation": NO_CHOICE,
    "model.mixers": NO_CHOICE,
    "model.rope": NO_CHOICE,
    "model.output_gate": NO_CHOICE,
    "model.head_norm": NO_CHOICE,
    "model.embedding_scale": NO_CHOICE,
    "model.tied_output": NO_CHOICE,
    "model.ngram_embedding": "it is a vector of the last tokens, but an encoder looks at both sides",
    "model.add_ngram": "n-gram heads look up what followed the last tokens, which an encoder already sees",
    "training.segment": NO_STATE,
    "training.sequence_parallel": NO_STATE,
    "training.carry_state": NO_STATE,
    "training.state_passing": NO_STATE,
    "training.quantize": "--weights is for decoding, and an encoder writes no text",
    "training.sample_tokens": "an encoder writes no text",
    "training.teacher": "an encoder cannot learn from a teacher, which predicts next tokens",
}
"""Options that must keep their defaults for an encoder, and why."""

NO_TEXT = "a model that learns labels writes no text"
NOT_WITH_LABELS = {
    "training.sequence_parallel": "objective: label reads each row on one device",
    "training.quantize": NO_TEXT,
    "training.sample_tokens": NO_TEXT,
    "training.teacher": "labels are learned from the text alone",
    "training.only_ngram": "the output layer of the labels has to be trained too",
}
"""Options that must keep their defaults with objective: label, and why."""

STATE_PASSING = ("carry_state", "state_passing")
"""Options of training that pass the state after a batch to the next batch."""


class Sections(NamedTuple):
    """The sections of a recipe that are compared."""

    text: Text
    model: Model
    training: Training


ENCODER = Sections(Text(), Model(**ENCODER_DEFAULTS["model"]), Training())
DEFAULTS = Sections(Text(), Model(), Training())
Objective = Literal["causal", "masked", "label"]


def trains_encoder(objective: str, model: Model) -> bool:
    """Return whether the model of a recipe is an encoder."""
    return objective == "masked" or (objective == "label" and model.encoder)


def disagreements(objective: Objective, sections: Sections) -> Iterator[PydanticCustomError]:
    """Iterate over the mistakes in combinations of sections."""
    model, is_encoder = sections.model, trains_encoder(objective, sections.model)
    if objective == "label":
        yield from _labels(sections)
    elif sections.text.labels:
        yield mistake("text.labels", f"objective: {objective} learns no labels. Leave it out, or set objective: label.")
    if objective == "causal" and model.encoder:
        why = "an encoder predicts no next token. Leave it out, or set objective: masked or label."
        yield mistake("model.encoder", why)
    for key, kind in _kinds_by_key(model):
        about = ATTENTION_KINDS[kind]
        if not (about.encoder if is_encoder else about.causal):
            yield mistake(key, why_misfit(kind))
    rotating = model.kinds if is_encoder else [kind for kind in model.kinds if model.rotates(kind)]
    if not is_encoder or model.positions in ("auto", "rotary"):
        yield from _odd_heads(model, rotating)
    yield from _encoder(sections) if is_encoder else _causal(*sections)


def _odd_heads(model: Model, rotating: Sequence[str]) -> Iterator[PydanticCustomError]:
    """Iterate over the keys of heads of an odd size, of the kinds that rotate queries and keys."""
    own = [mixer.kind for mixer in model.mixers]
    for prefix, kind in {f"mixers.{own.index(kind)}." if kind in own else "": kind for kind in rotating}.items():
        options = model.of_kind(kind)
        size, key = options.head_dims.key, f"model.{prefix}" + ("head_dim" if options.head_dim else "heads")
        if size % 2:
            yield mistake(key, f"rotary positions need queries of an even size, not {size}. Use an even size.")
        elif (rotated := options.rope.rotated(size)) < 2 or rotated % 2:
            why = f"{options.rope.share:g} of {size} numbers is {rotated}, which are no pairs. Use another share."
            yield mistake(f"model.{prefix}rope.share", why)


def _kinds_by_key(model: Model) -> Iterator[tuple[str, str]]:
    """Iterate over the keys that name attentions, with their kinds."""
    kinds = model.attention.kind
    if isinstance(kinds, str):
        yield "model.attention.kind", kinds
    else:
        yield from ((f"model.attention.kind.{number}", kind) for number, kind in enumerate(kinds))


def _causal(text: Text, model: Model, training: Training) -> Iterator[PydanticCustomError]:
    if model.positions == "absolute":
        yield mistake("model.positions", "absolute positions are only for encoders. Use rotary, none or auto.")
    passing = [key for key in STATE_PASSING if getattr(training, key)]
    for key in ("segment", *STATE_PASSING):
        if getattr(training, key) and (why := why_state_grows(model.kinds)):
            yield mistake(f"training.{key}", why)
    if training.only_ngram and not model.add_ngram:
        yield mistake("training.only_ngram", "the model has no added heads. Choose layers in model.add_ngram.")
    if text.sequence_length % model.factor:
        why = f"{text.sequence_length} is not a multiple of model.downsample.factor, {model.factor}."
        longer = -(-text.sequence_length // model.factor) * model.factor
        yield mistake("text.sequence_length", f"{why} Use {longer}.")
    if text.short_steps and (text.rows == "documents" or passing or training.sequence_parallel > 1):
        why = "parts of sequences are only read of windows, without states passed and without sequence_parallel."
        yield mistake("text.short_steps", f"{why} Set it to 0.")
    if text.short_steps and text.sequence_length % (SHORT_PARTS * model.factor):
        why = f"text.sequence_length, {text.sequence_length}, is not a multiple of {SHORT_PARTS * model.factor}."
        yield mistake("text.short_steps", f"{why} Change it, or set this to 0.")
    for key in passing:
        if text.rows == "documents":
            why = "not used with whole documents, which begin from an empty state. Leave it out."
            yield mistake(f"training.{key}", why)
        if model.attention.favor.resample_every:
            why = "states become invalid when random features are resampled. Leave this out, or resample_every."
            yield mistake(f"training.{key}", why)
    if (parts := training.sequence_parallel) > 1:
        yield from _in_parts(parts, text, model)


def _in_parts(parts: int, text: Text, model: Model) -> Iterator[PydanticCustomError]:
    """Iterate over the mistakes in a recipe whose rows are read in parts by several devices."""
    key = "training.sequence_parallel"
    if model.downsample:
        yield mistake(key, "not supported with model.downsample, whose blocks would lie in two parts. Leave one out.")
    if model.dropout:
        yield mistake(key, "not supported with model.dropout, whose draws would differ by part. Leave one out.")
    shortest = text.sequence_length if text.rows == "windows" else -(-text.sequence_length // ROW_LENGTHS)
    if shortest < parts:
        yield mistake(key, f"rows of {shortest} tokens cannot be divided into {parts} parts. Use fewer devices.")


def _labels(sections: Sections) -> Iterator[PydanticCustomError]:
    if sections.text.labels is None:
        yield mistake("text.labels", "objective: label needs them. Leave it out, for those in the field `label`.")
    if sections.text.rows != "documents":
        yield mistake("text.rows", "a label belongs to a whole document. Leave it out.")
    yield from _unlike(DEFAULTS, sections, NOT_WITH_LABELS)


def _unlike(defaults: Sections, sections: Sections, reasons: dict[str, str]) -> Iterator[PydanticCustomError]:
    """Iterate over the options that must keep their defaults and do not."""
    for key, why in reasons.items():
        option = attrgetter(key)
        if option(sections) != option(defaults):
            yield mistake(key, f"{why}. Leave it out.")


def _encoder(sections: Sections) -> Iterator[PydanticCustomError]:
    text, model, training = sections
    yield from _unlike(ENCODER, sections, CAUSAL_ONLY)
    if training.kernel in ("triton", "fla"):
        why = "the kernels only read the past, but an encoder looks at both sides. Leave it out."
        yield mistake("training.kernel", why)
    longest = model.layer_lengths("linformer", text.sequence_length)
    if longest and (misfit := model.attention.linformer.misfit(longest, model.heads)):
        key, why = misfit
        if model.downsample:
            why += f" The middle layers read blocks of {model.factor} tokens (model.downsample)."
        yield mistake(f"model.attention.linformer.{key}", why)
