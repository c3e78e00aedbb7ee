"""The singular values of attention, where they are known in closed form."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from models import predict, stirred
from torch import Tensor

from lmlong.attention.device_policy import CPU_POLICY, GPU_POLICY, DevicePolicy, use_policy
from lmlong.attention.inputs import draw_inputs
from lmlong.attention.registry import CAUSAL, ENCODER
from lmlong.cli.evaluate import eval_
from lmlong.data.token_file import TokenFile
from lmlong.data.tokenizers.base import ByteTokenizer
from lmlong.errors import UsageError
from lmlong.evaluation.spectrum import (
    LayerSpectrum,
    Spectrum,
    attention_matrices,
    count_needed,
    cumulative,
    figure,
    matrix,
    measure_spectra,
    spectrum_report,
)
from lmlong.inference.loading import TrainedModel
from lmlong.model.build import build
from lmlong.model.language_model import LanguageModel
from lmlong.recipe import Attention, Linformer, Model, Recipe
from lmlong.report.plot import draw

T = 24
HEADS, WIDTH = 2, 4


def options(kind: str, **others: object) -> Attention:
    return Attention.model_validate({"kind": kind, **others})


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_attention_to_the_token_alone_has_a_flat_spectrum() -> None:
    attention = CAUSAL["window"](HEADS, WIDTH, WIDTH, options("window", window=1))
    found = matrix(attention, drawn(1, HEADS, T, WIDTH), drawn(1, HEADS, T, WIDTH, seed=1))
    assert torch.equal(found[0], torch.eye(T, dtype=torch.float64).expand(HEADS, -1, -1))
    curves = cumulative([found[0], found[0]])
    assert [layer.shape for layer in curves] == [(HEADS, T)] * 2
    assert all(np.abs(layer - np.arange(1, T + 1) / T).max() < 1e-12 for layer in curves)
    assert (count_needed(np.stack(curves)) == np.ceil(0.9 * T)).all()


@pytest.mark.parametrize("rank", [1, 10])
def test_a_matrix_of_equal_values_and_some_rank(rank: int) -> None:
    left, _ = torch.linalg.qr(drawn(T, T))
    other, _ = torch.linalg.qr(drawn(T, T, seed=1))
    (curve,) = cumulative([(left[:, :rank] @ other[:rank])[None]])
    assert np.abs(curve[0] - np.minimum(np.arange(1, T + 1) / rank, 1)).max() < 1e-12
    assert count_needed(curve)[0] == np.ceil(0.9 * rank)


@pytest.mark.parametrize("kind", CAUSAL)
def test_the_matrix_is_what_values_are_multiplied_with(kind: str) -> None:
    attention = CAUSAL[kind](HEADS, WIDTH, WIDTH, options(kind, window=5)).double()
    q, k, v = (drawn(2, HEADS, T, WIDTH, seed=seed) for seed in range(3))
    q, k = (x if attention.has_keys else x[..., :0] for x in (q, k))
    starts = torch.arange(T).expand(2, -1) % 7 == 0
    inputs = draw_inputs(attention.inputs, 2, T, torch.Generator().manual_seed(3), torch.float64, starts)
    found = matrix(attention, q, k, starts, inputs)
    y, _ = attention(q, k, v, attention.init_state(2, q.device, q.dtype), starts, inputs)
    assert (found @ v - y).abs().max() < 1e-10
    assert not found.triu(1).any()
    if kind not in ("delta", "ngram"):  # which take no mean over all of the past
        assert (found.sum(-1) - 1).abs().max() < 1e-10


@pytest.mark.parametrize("kind", ENCODER)
def test_the_matrix_of_an_encoder_has_the_rank_of_its_features_or_slots(kind: str) -> None:
    most = {"full": T, "linformer": 3, "efficient": WIDTH, "linear": WIDTH}[kind]
    (attention,) = ENCODER[kind]([T], HEADS, WIDTH, Attention(linformer=Linformer(projected=3)))
    q, k, v = (drawn(1, HEADS, T, WIDTH, seed=seed) for seed in range(3))
    found = matrix(attention.double(), q, k).detach()
    assert (found @ v - attention(q, k, v)).abs().max() < 1e-10
    curve = cumulative([found[0]])[0]
    assert (curve[:, most - 1] > 1 - 1e-9).all() and (curve[:, most - 2] < 1 - 1e-9).all()


def test_matrices_are_those_of_every_layer_while_a_model_reads() -> None:
    model = LanguageModel(Model(width=8, layers=3, heads=HEADS, attention=options("window", window=1)), 30)
    stirred(model)
    tokens = np.arange(T)
    before, _ = predict(model, torch.from_numpy(tokens)[None])
    matrices = attention_matrices(model, tokens)
    assert len(matrices) == 3 and all(torch.equal(each, torch.eye(T).expand(HEADS, -1, -1)) for each in matrices)
    after, _ = predict(model, torch.from_numpy(tokens)[None])
    assert torch.equal(before, after)  # looking leaves nothing behind


def encoder(projection: str) -> TrainedModel:
    """Of inputs of 16 bytes."""
    attention = options("linformer", linformer={"projected": 4, "projection": projection})
    model = {"width": 8, "layers": 2, "heads": HEADS, "attention": attention.model_dump(exclude_unset=True)}
    recipe = Recipe.model_validate(
        {"objective": "masked", "model": model, "text": {"sequence_length": 16}, "training": {"steps": 1}}
    )
    return TrainedModel(build(recipe, 258), ByteTokenizer(), recipe, Path("run"))


def test_linformers_that_no_matrix_describes_are_refused() -> None:
    text = TokenFile(np.arange(40), np.array([0]))
    (found,) = measure_spectra("run", encoder("linear"), text, [16], 2)
    assert found.texts == 2 and all((layer.cumulative[:, 3] > 1 - 1e-6).all() for layer in found.layers)  # rank 4
    with pytest.raises(UsageError, match=r"32 tokens are more than the 16 .* Give shorter ones"):
        measure_spectra("run", encoder("mean"), text, [16, 32])
    with pytest.raises(UsageError, match=r"run: its Linformer projects by conv"):
        measure_spectra("run", encoder("conv"), text, [16])


BLOCKS = {"width": 8, "layers": 3, "heads": HEADS, "downsample": {"factor": 4}}
ALONE = {"attention": {"kind": "window", "window": 1}}


def spectrum_of(objective: str, length: int, options: dict[str, Any], policy: DevicePolicy | None = None) -> Spectrum:
    """Return the spectrum of three layers, those in the middle on blocks of four."""
    recipe = Recipe.model_validate(
        {
            "objective": objective,
            "model": {**BLOCKS, **options},
            "text": {"sequence_length": 16},
            "training": {"steps": 1},
        }
    )
    trained = TrainedModel(stirred(build(recipe, 258), 0.3), ByteTokenizer(), recipe, Path("run"))
    use_policy(trained.model, policy)
    (found,) = measure_spectra("run", trained, TokenFile(np.arange(40), np.array([0])), [length], 2)
    return found


@pytest.mark.parametrize("policy", [CPU_POLICY, GPU_POLICY], ids=["CPU", "GPU"])
@pytest.mark.parametrize(("length", "blocks"), [(16, 4), (19, 4), (4, 1)])
def test_layers_that_read_blocks_have_smaller_matrices(length: int, blocks: int, policy: DevicePolicy) -> None:
    layers = spectrum_of("causal", length, ALONE, policy).layers
    assert [layer.values for layer in layers] == [length, blocks, length]
    for layer in layers:
        assert np.abs(layer.cumulative - np.arange(1, layer.values + 1) / layer.values).max() < 1e-12
        assert (layer.needed == np.ceil(0.9 * layer.values)).all()
        assert layer.quarter == pytest.approx([max(layer.values // 4, 1) / layer.values] * HEADS)


def test_the_command_tabulates_draws_and_writes_json(run: Path, tmp_path: Path) -> None:
    numbers, plot = tmp_path / "spectrum.json", tmp_path / "spectrum.png"
    words = [str(run), "--by", "spectrum", "--lengths", "16,32", "--texts", "4", "--device", "cpu"]
    done = CliRunner().invoke(eval_, [*words, "--json", str(numbers), "--plot", str(plot)])
    assert done.exit_code == 0, done.output
    assert plot.read_bytes().startswith(b"\x89PNG")
    (written,) = json.loads(numbers.read_text())["runs"]
    assert [(each["length"], each["texts"], len(each["layers"])) for each in written["spectra"]] == [
        (16, 4, 2), (32, 4, 2)
    ]  # fmt: skip
    first = written["spectra"][0]["layers"][0]
    assert np.array(first["cumulative"]).shape == (2, 16)
    assert first["quarter"] == [curve[3] for curve in first["cumulative"]]
    shown = next(line.split() for line in done.stdout.splitlines() if line.startswith("      1"))
    assert float(shown[2]) == pytest.approx(np.mean(first["needed"]), abs=0.051)


def made_up(name: str, length: int, layers: Sequence[Sequence[int]]) -> Spectrum:
    """Of matrices whose singular values are alike as far as their ranks, by layer and head."""
    curves = [np.array([np.minimum(np.arange(1, length + 1) / rank, 1) for rank in heads]) for heads in layers]
    spectra = [LayerSpectrum(number, "softmax", each, count_needed(each)) for number, each in enumerate(curves, 1)]
    return Spectrum(name, length, 2, spectra)


FOUND = [made_up("one", 16, [[1, 16], [4, 8]]), made_up("two", 1024, [[10, 20]])]


def test_the_table_has_a_line_for_each_layer() -> None:
    shown = spectrum_report(FOUND).text()
    lines = [line.split() for line in shown.splitlines()]
    assert "one: singular values of attention in 2 texts of n = 16 tokens" in shown
    assert ["1", "softmax", "8.0", "50%", "1", "to", "15", "0.625", "0.250", "to", "1.000"] in lines
    assert ["2", "softmax", "6.0", "38%", "4", "to", "8", "0.750", "0.500", "to", "1.000"] in lines
    wide = spectrum_report([made_up("run", 65_536, [[60_000, 59_000]])]).text()
    assert max(map(len, wide.splitlines())) <= 80


def test_the_chart_has_a_curve_for_each_layer() -> None:
    curves, _ = draw(figure(FOUND)).axes
    lines = {line.get_label(): line for line in curves.lines}
    assert list(lines["layer 2"].get_ydata()) == pytest.approx(list(FOUND[0].layers[1].cumulative.mean(axis=0)))


def test_the_report_marks_layers_that_read_blocks() -> None:
    long, short = made_up("run", 16, [[1, 16], [4, 8]]), made_up("run", 8, [[2, 8], [2, 2]])
    mixed = long._replace(layers=[long.layers[0], *short.layers, long.layers[1]])
    mixed = mixed._replace(layers=[layer._replace(number=number) for number, layer in enumerate(mixed.layers, 1)])
    report = spectrum_report([mixed])
    shown = report.text()
    assert (
        "\nlayers 2 to 3 read blocks of them: n = 8 there\n" in shown
        and "blocks of" not in spectrum_report([long]).text()
    )
    lines = [line.split() for line in shown.splitlines()]
    assert ["2", "softmax", "5.0", "62%", "2", "to", "8", "0.625", "0.250", "to", "1.000"] in lines
    (of_run,) = json.loads(report.json())["runs"]
    layers = of_run["spectra"][0]["layers"]
    assert [layer["values"] for layer in layers] == [len(layer["cumulative"][0]) for layer in layers] == [16, 8, 8, 16]
    (curves,) = draw(figure([mixed])).axes
    assert [len(line.get_xdata()) for line in curves.lines[:4]] == [16, 8, 8, 16]
    deep = draw(figure([mixed, made_up("deep", 16, [[1]] * 5)]))
    assert [text.get_text() for text in deep.legends[0].get_texts()][-2:] == ["layer 5", "all alike"]
