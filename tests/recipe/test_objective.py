"""What a recipe for an encoder may hold: it has what it needs by itself, and every misfit is told at once."""

import pytest

from lmlong.recipe.file import dump

from .conftest import Complaints, Loaded

START = "objective: masked\ntraining: {steps: 1}\n"


@pytest.mark.parametrize("kind", ["linear", "full", "linformer", "efficient", "[linformer, full]"])
def test_encoder_needs_only_its_objective(loaded: Loaded, kind: str) -> None:
    recipe = loaded(START, f"model.attention.kind={kind}")
    assert (recipe.model.convolution, recipe.model.attention.decay) == (5, "none")
    assert (recipe.text.masking.share, recipe.text.masking.kind) == (0.15, "bert")
    assert recipe.targets_per_sequence == 0.15 * recipe.text.sequence_length
    assert loaded(dump(recipe)) == recipe
    assert loaded("training: {steps: 1}\n", "objective=masked").model.convolution == 5


NGRAM_AMONG_FOUR = ["linear", "ngram", "linear", "linear"]


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("model:\n  layers: 4\n", NGRAM_AMONG_FOUR),
        ("model:\n  layers: 4\n  attention: {decay: none}\n", NGRAM_AMONG_FOUR),
        ("model:\n  layers: 4\n  downsample: {factor: 4}\n", 4 * ["linear"]),
        ("model:\n  layers: 4\n  downsample: {factor: 4}\n  attention: {decay: none}\n", 4 * ["linear"]),
        ("model:\n  layers: 4\n  downsample: {factor: 4}\n  attention: {kind: delta}\n", 4 * ["delta"]),
        ("objective: masked\nmodel:\n  layers: 4\n", 4 * ["linear"]),
    ],
)
def test_default_model_has_ngram_layers(loaded: Loaded, text: str, kinds: list[str]) -> None:
    recipe = loaded(text)
    assert recipe.model.kinds == kinds
    assert loaded(dump(recipe)) == recipe


def test_all_that_an_encoder_cannot_have_is_reported(complaints: Complaints) -> None:
    text = """\
objective: masked
model:
  convolution: 4
  value_dim: 8
  attention:
    kind: [full, softmax, window, linformer]
    decay: learned
    linformer:
      projected: 300
text: {sequence_length: 256}
training:
  steps: 1
  segment: 64
  carry_state: true
  kernel: triton
learn: true
"""
    starts = [
        "file:4: model.value_dim: an encoder keeps no state, and its heads always have width / heads",
        "file:6: model.attention.kind.1: softmax only looks at the past, but an encoder looks at both sides. Use full",
        "file:6: model.attention.kind.2: window only looks at the past, but an encoder looks at both sides. Use full",
        "file:7: model.attention.decay: an encoder sees all of its text at once",
        "file:9: model.attention.linformer.projected: 300 slots for a longest input of 256. Use 1 up to that.",
        "file:13: training.segment: an encoder reads its text at once",
        "file:14: training.carry_state: an encoder reads its text at once",
        "file:15: training.kernel: the kernels only read the past",
        "file:16: learn: an encoder reads its text at once",
    ]
    found = complaints(text)
    assert len(found) == len(starts)
    assert all(message.startswith(start) for message, start in zip(found, starts, strict=True)), found


def test_all_that_a_causal_model_cannot_have_is_reported(complaints: Complaints) -> None:
    kinds = "[full, linear, efficient, linformer]"
    text = f"training: {{steps: 1}}\nmodel:\n  positions: absolute\n  attention: {{kind: {kinds}}}\n"
    starts = [
        "file:3: model.positions: absolute",
        "file:4: model.attention.kind.0: full also looks at the future, so it cannot be causal. Use softmax",
        "file:4: model.attention.kind.2: efficient normalises keys over the whole sequence, also the future",
        "file:4: model.attention.kind.3: linformer mixes all positions, also future ones",
    ]
    found = complaints(text)
    assert len(found) == len(starts)
    assert all(message.startswith(start) for message, start in zip(found, starts, strict=True)), found
    assert all("or train an encoder by objective: masked" in message for message in found[1:])


LABELS = "objective: label\ntraining: {steps: 1}\n"


def test_labels_need_only_their_objective(loaded: Loaded) -> None:
    causal = loaded(LABELS)
    assert (causal.is_encoder, causal.text.rows, causal.targets_per_sequence) == (False, "documents", 1)
    assert causal.text.labels is not None and (causal.text.labels.field, causal.label_names) == ("label", [])
    encoder = loaded(LABELS, "model.encoder=true", "model.attention.kind=full", "text.labels.names=[a, b]")
    assert encoder.is_encoder and (encoder.model.convolution, encoder.model.attention.decay) == (5, "none")
    assert encoder.label_names == ["a", "b"] and loaded(START).label_names is None
    assert loaded(START).is_encoder and loaded(START, "model.encoder=true").is_encoder
    assert all(loaded(dump(recipe)) == recipe for recipe in (causal, encoder))


LABELS_AND_MORE = """\
objective: label
text:
  rows: windows
  labels: {names: [a, b]}
model: {attention: {kind: [linear, full]}}
training:
  steps: 1
  quantize: int8
  sample_tokens: 9
  teacher: runs/a
learn: true
"""


def test_all_that_does_not_go_with_labels_is_reported(complaints: Complaints) -> None:
    starts = [
        "file:3: text.rows: a label belongs to a whole document. Leave it out.",
        "file:5: model.attention.kind.1: full",
        "file:8: training.quantize: a model that learns labels writes no text. Leave it out.",
        "file:9: training.sample_tokens: a model that learns labels writes no text",
        "file:10: training.teacher: labels are learned from the text alone",
        "file:11: learn: a model of labels predicts no tokens",
    ]
    found = complaints(LABELS_AND_MORE)
    assert len(found) == len(starts), found
    assert all(message.startswith(start) for message, start in zip(found, starts, strict=True)), found
    for text, overrides, start in (
        (LABELS, ("text.labels={names: [a]}",), "text.labels={names: [a]}: text.labels.names: with one label"),
        (LABELS, ("training.sequence_parallel=2", "devices=2"), "training.sequence_parallel=2: objective: label reads"),
        (LABELS, ("text.labels=null",), "text.labels=null: objective: label needs them"),
        (LABELS + "model: {encoder: true, value_dim: 8}\n", (), "file:3: model.value_dim: an encoder keeps no state"),
        ("training: {steps: 1}\ntext: {labels: {}}\n", (), "file:2: text.labels: objective: causal learns no labels"),
        ("training: {steps: 1}\nmodel: {encoder: true}\n", (), "file:2: model.encoder: an encoder predicts no next"),
    ):
        (only,) = complaints(text, *overrides)
        assert only.startswith(start), only


FLAT = "model: {layers: 3}\ntext: {sequence_length: 256}\n"
HOURGLASS = "model: {layers: 3, downsample: {factor: 4}}\ntext: {sequence_length: 257}\n"
UNEQUAL = "projected: [8, 8, [8, 8, 8, 4]]"


@pytest.mark.parametrize(
    ("shape", "linformer", "message"),
    [
        (
            FLAT,
            "projected: 100, projection: mean",
            "projected: 100 does not divide a longest input of 256; projection m",
        ),
        (FLAT, "projected: [8, 8]", "projected: [8, 8] is not one number, one for each of 3 layers, or 4 for each."),
        (FLAT, UNEQUAL, "projected: heads with different k cannot share a matrix; sharing is headwise. Use none."),
        (FLAT, "projected: [8, 8, 4], sharing: layerwise", "projected: layers with different k cannot share a matrix"),
        (FLAT, "projected: 0", "projected: expected a whole number, above 0"),
        (FLAT, "projected: [4, 0]", "projected.1: expected a whole number, above 0"),
        (FLAT, "projected: [[4, x], 4]", "projected.0.1: expected a whole number, above 0, got 'x'."),
        (FLAT, "projected: []", "projected: expected a list of 1 or more"),
        (HOURGLASS, "", "projected: 128 slots for a longest input of 65. Use 1 up to that."),
        (
            HOURGLASS,
            "projected: [1, 64, 257], projection: conv",
            "projected: 64 does not divide a longest input of 65;",
        ),
        (HOURGLASS, "projected: 8, sharing: layerwise", "sharing: layers with inputs of 257 and 65 vectors cannot"),
    ],
)
def test_slots_that_do_not_fit_are_refused(complaints: Complaints, shape: str, linformer: str, message: str) -> None:
    override = f"model.attention={{kind: linformer, linformer: {{{linformer}}}}}"
    (found,) = complaints(START + shape, override)
    assert found.startswith(f"{override}: model.attention.linformer.{message}")
    remedy = " The middle layers read blocks of 4 tokens (model.downsample)."
    assert found.endswith(remedy) == (shape == HOURGLASS)


@pytest.mark.parametrize("linformer", ["{projected: [257, 65, 257]}", "{projected: [1, 13, 257], projection: max}"])
def test_encoder_reads_blocks_of_any_length(loaded: Loaded, linformer: str) -> None:
    attention = f"model.attention={{kind: linformer, linformer: {linformer}}}"
    assert loaded(START + HOURGLASS, attention).model.layer_lengths("linformer", 257) == [257, 65, 257]
    inside = "model.attention={kind: [full, linformer, full], linformer: {projected: 65, sharing: layerwise}}"
    assert loaded(START + HOURGLASS, inside).model.layer_lengths("linformer", 257) == [65]
    listed = "model.attention={kind: [linformer, full], linformer: {projected: [8, [4, 4, 4, 4]]}}"
    assert loaded(START + FLAT, listed).model.kinds.count("linformer") == 2


def test_head_sizes_need_not_divide_the_width(complaints: Complaints, loaded: Loaded) -> None:
    causal = "training: {steps: 1}\n"
    assert loaded(causal, "model.width=15", "model.head_dim=6").model.head_dims == (6, 6)
    assert loaded(causal, "model.width=16", "model.heads=4", "model.value_dim=9").model.head_dims == (4, 9)
    even = "rotary positions need queries of an even size, not 7. Use an even size."
    assert complaints(causal, "model.positions=rotary", "model.head_dim=7") == [f"model.head_dim=7: {even}"]
    odd = [START, "model.width=15", "model.heads=5"]
    assert "rotary positions need queries of an even size" in complaints(*odd)[0]
    assert loaded(*odd, "model.positions=absolute").model.width == 15
