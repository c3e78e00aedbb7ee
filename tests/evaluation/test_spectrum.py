"""The singular values of attention, where they are known in closed form."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import lmlong
from models import stirred
from torch import Tensor

from lmlong.attention.device_policy import CPU_POLICY, GPU_POLICY, DevicePolicy, use_policy
from lmlong.attention.inputs import draw_inputs
from lmlong.attention.registry import CAUSAL, ENCODER
from lmlong.data.token_file import TokenFile
from lmlong.data.tokenizers.base import ByteTokenizer
from lmlong.errors import UsageError
from lmlong.evaluation.spectrum import (
    LayerSpectrum,
    Spectrum,
    count_needed,
    cumulative,
    figure,
    matrix,
    measure_spectra,
    spectrum_report,
)
from lmlong.inference.trained_model import TrainedModel
from lmlong.model.build import build
from lmlong.recipe import Attention, Linformer, Recipe
from lmlong.report.plot import draw

T = 24
HEADS, WIDTH = 2, 4


def options(kind: str, **others: object) -> Attention:
    return Attention.model_validate({"kind": kind, **others})


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


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


def trained_model(objective: str, **model: Any) -> TrainedModel:
    """Of three layers and, if it is an encoder, inputs of 16 bytes."""
    recipe = Recipe.model_validate(
        {
            "objective": objective,
            "model": {"width": 8, "layers": 3, "heads": HEADS, **model},
            "text": {"sequence_length": 16},
            "training": {"steps": 1},
        }
    )
    return TrainedModel(build(recipe, 258), ByteTokenizer(), recipe, Path("run"))


def linformer(projection: str) -> TrainedModel:
    attention = {"kind": "linformer", "linformer": {"projected": 4, "projection": projection}}
    return trained_model("masked", attention=attention)


TEXT = TokenFile(np.arange(40), np.array([0]))


def test_linformers_that_no_matrix_describes_are_refused() -> None:
    (found,) = measure_spectra("run", linformer("linear"), TEXT, [16], 2)
    assert found.texts == 2 and all((layer.cumulative[:, 3] > 1 - 1e-6).all() for layer in found.layers)  # rank 4
    with pytest.raises(UsageError, match=r"32 tokens are more than the 16 .* Give shorter ones"):
        measure_spectra("run", linformer("mean"), TEXT, [16, 32])
    with pytest.raises(UsageError, match=r"run: its Linformer projects by conv"):
        measure_spectra("run", linformer("conv"), TEXT, [16])


@pytest.mark.parametrize("policy", [CPU_POLICY, GPU_POLICY], ids=["CPU", "GPU"])
@pytest.mark.parametrize(("length", "blocks"), [(16, 4), (19, 4), (4, 1)])
def test_layers_that_read_blocks_have_smaller_matrices(length: int, blocks: int, policy: DevicePolicy) -> None:
    """Attention to the token or block alone, which has a flat spectrum."""
    trained = trained_model("causal", downsample={"factor": 4}, attention={"kind": "window", "window": 1})
    use_policy(stirred(trained.model, 0.3), policy)
    (found,) = measure_spectra("run", trained, TEXT, [length], 2)
    assert [layer.values for layer in found.layers] == [length, blocks, length]
    for layer in found.layers:
        assert np.abs(layer.cumulative - np.arange(1, layer.values + 1) / layer.values).max() < 1e-12
        assert (layer.needed == np.ceil(0.9 * layer.values)).all()
        assert layer.quarter == pytest.approx([max(layer.values // 4, 1) / layer.values] * HEADS)


def test_the_command_tabulates_draws_and_writes_json(run: Path, tmp_path: Path) -> None:
    numbers, plot = tmp_path / "spectrum.json", tmp_path / "spectrum.png"
    words = ("--by", "spectrum", "--lengths", "16,32", "--texts", 4, "--json", numbers, "--plot", plot)
    done = lmlong("eval", run, *words, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert plot.read_bytes().startswith(b"\x89PNG")
    (written,) = json.loads(numbers.read_text())["runs"]
    spectra = [(each["length"], each["texts"], len(each["layers"])) for each in written["spectra"]]
    assert spectra == [(16, 4, 2), (32, 4, 2)]
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


def test_the_report_and_the_chart_have_a_line_for_each_layer() -> None:
    whole, blocks = made_up("run", 16, [[1, 16], [4, 8]]), made_up("run", 8, [[2, 8], [2, 2]])
    layers = [whole.layers[0], *blocks.layers, whole.layers[1]]
    mixed = whole._replace(layers=[layer._replace(number=number) for number, layer in enumerate(layers, 1)])
    report = spectrum_report([mixed])
    lines = [line.split() for line in report.text().splitlines()]
    assert "run: singular values of attention in 2 texts of n = 16 tokens" in report.text()
    assert "\nlayers 2 to 3 read blocks of them: n = 8 there\n" in report.text()
    assert "blocks of" not in spectrum_report([whole]).text()
    assert ["1", "softmax", "8.0", "50%", "1", "to", "15", "0.625", "0.250", "to", "1.000"] in lines
    assert ["2", "softmax", "5.0", "62%", "2", "to", "8", "0.625", "0.250", "to", "1.000"] in lines
    wide = spectrum_report([made_up("run", 65_536, [[60_000, 59_000]])]).text()
    assert max(map(len, wide.splitlines())) <= 80

    (of_run,) = json.loads(report.json())["runs"]
    written = of_run["spectra"][0]["layers"]
    assert [layer["values"] for layer in written] == [len(layer["cumulative"][0]) for layer in written]
    (curves,) = draw(figure([mixed])).axes
    for layer, line in zip(mixed.layers, curves.lines, strict=False):
        assert list(line.get_xdata()) == list(range(1, layer.values + 1))
        assert list(line.get_ydata()) == pytest.approx(list(layer.cumulative.mean(axis=0)))
    deep = draw(figure([mixed, made_up("deep", 16, [[1]] * 5)]))
    assert [text.get_text() for text in deep.legends[0].get_texts()][-2:] == ["layer 5", "all alike"]
