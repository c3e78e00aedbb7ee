"""Options that exclude each other, each with the others of one recipe."""

import pytest

from .conftest import Complaints

SMALL = ["text.sequence_length=64", "training.steps=12", "training.batch_size=4", "model.layers=2"]

COMBINATIONS: dict[str, dict[tuple[str, ...], str]] = {
    "training.sequence_parallel=2": {
        ("training.segment=16",): "segment=16: the parts of a row exchange states layer by layer",
        ("training.compile=true",): "compile=true: the exchange between the parts of a row cannot be compiled",
        ("model.dropout=0.1",): "sequence_parallel=2: not supported with model.dropout",
        ("model.layers=3", "model.downsample.factor=2"): "sequence_parallel=2: not supported with model.downsample",
        ("training.sequence_parallel=3",): "3 devices cannot read a row together with devices: 2 on nodes: 1",
        ("nodes=3", "training.sequence_parallel=4"): "4 devices cannot read a row together with devices: 2 on nodes: 3",
        (
            "devices=128",
            "training.sequence_parallel=128",
        ): "64 tokens cannot be divided into 128 parts. Use fewer devices.",
        ("text.rows=documents", "devices=5", "training.sequence_parallel=5"): "4 tokens cannot be divided into 5 parts",
        ("objective=masked",): "training.sequence_parallel=2: an encoder reads its text at once",
    },
    "training.state_passing=0.5": {
        ("model.attention.kind=softmax",): "training.state_passing",
        ("text.rows=documents",): "training.state_passing",
        ("objective=masked", "model.attention.kind=full"): "training.state_passing",
        ("model.attention.feature_map=favor", "model.attention.favor.resample_every=5"): "training.state_passing",
    },
    "training.quantize=int4": {
        ("objective=masked", "model.attention.kind=full"): "training.quantize=int4: --weights is for decoding",
        ("training.compile=true",): "not supported with compile",
        ("training.teacher=base", "training.teacher_of=layers"): "teacher_of: layers trains parts of the model only",
    },
    "training.teacher=base": {
        ("objective=masked",): "training.teacher",
        ("training.carry_state=true",): "training.teacher",
        ("devices=2", "training.sequence_parallel=2"): "learns from a teacher, which reads whole rows",
    },
    "training.teacher_of=layers": {
        (): "training.teacher_of=layers: teacher_of: layers needs one",
        ("training.teacher=base", "training.segment=16"): "segment=16: teacher_of: layers compares whole sequences",
        ("training.teacher=base", "training.strategy=deepspeed"): "deepspeed is not supported with teacher_of: layers",
    },
}


@pytest.mark.parametrize(
    ("option", "others"), [(option, others) for option in COMBINATIONS for others in COMBINATIONS[option]]
)
def test_excluded_combination_is_refused(complaints: Complaints, option: str, others: tuple[str, ...]) -> None:
    found = complaints(f"devices: {2 if 'parallel' in option else 1}\n", *SMALL, option, *others)
    assert any(COMBINATIONS[option][others] in mistake for mistake in found), found
