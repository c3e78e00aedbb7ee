"""The singular values of attention, where they are known in closed form."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from models import stirred
from torch import Tensor

from lmlong.attention.inputs import draw_inputs
from lmlong.attention.registry import CAUSAL, ENCODER
from lmlong.cli.spectrum import spectrum as spectrum_command
from lmlong.data.token_file import TokenFile
from lmlong.data.tokenizers.base import ByteTokenizer
from lmlong.errors import UsageError
from lmlong.evaluation.spectrum import Spectrum, attention_matrices, count_needed, cumulative, matrix, measure_spectra
from lmlong.inference.loading import TrainedModel
from lmlong.model.build import build
from lmlong.model.encoder import Encoder
from lmlong.model.language_model import LanguageModel
from lmlong.recipe import Attention, Linformer, Model, Recipe

T = 24
HEADS, WIDTH = 2, 4


def options(kind: str, **others: object) -> Attention:
    return Attention.model_validate({"kind": kind, **others})


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def running_mean() -> Tensor:
    """The matrix of the means over all tokens so far."""
    return torch.ones(T, T, dtype=torch.float64).tril() / torch.arange(1, T + 1)[:, None]


@pytest.mark.parametrize("kind", ["softmax", "linear"])
def test_attention_to_all_of_the_past_alike_is_the_running_mean(kind: str) -> None:
    attention = CAUSAL[kind](HEADS, WIDTH, WIDTH, options(kind, decay="none")).double()
    nothing = torch.zeros(1, HEADS, T, WIDTH, dtype=torch.float64)
    found = matrix(attention, nothing, nothing)
    assert (found - running_mean()).abs().max() < 1e-12
    values = torch.linalg.svdvals(running_mean())
    # 1/t in t entries of a row; and the determinant of a triangle is its diagonal's product
    assert values.square().sum() == pytest.approx(sum(1 / t for t in range(1, T + 1)))
    assert values.log().sum() == pytest.approx(-sum(np.log(t) for t in range(1, T + 1)))
    assert np.abs(cumulative([found[0]])[0] - (values.cumsum(0) / values.sum()).numpy()).max() < 1e-12


def test_attention_to_the_token_alone_has_a_flat_spectrum() -> None:
    attention = CAUSAL["window"](HEADS, WIDTH, WIDTH, options("window", window=1))
    found = matrix(attention, drawn(1, HEADS, T, WIDTH), drawn(1, HEADS, T, WIDTH, seed=1))
    assert torch.equal(found[0], torch.eye(T, dtype=torch.float64).expand(HEADS, -1, -1))
    curves = cumulative([found[0], found[0]])
    assert [layer.shape for layer in curves] == [(HEADS, T)] * 2
    assert all(np.abs(layer - np.arange(1, T + 1) / T).max() < 1e-12 for layer in curves)
    assert (count_needed(np.stack(curves)) == np.ceil(0.9 * T)).all()


@pytest.mark.parametrize("rank", [1, 5, 10])
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
def test_that_of_an_encoder_too_and_features_and_slots_bound_its_rank(kind: str) -> None:
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
    before, _ = model(torch.from_numpy(tokens)[None])
    matrices = attention_matrices(model, tokens)
    assert len(matrices) == 3 and all(torch.equal(each, torch.eye(T).expand(HEADS, -1, -1)) for each in matrices)
    after, _ = model(torch.from_numpy(tokens)[None])
    assert torch.equal(before, after)  # looking leaves nothing behind


def test_an_encoder_is_looked_into_alike() -> None:
    full = options("full", decay="none")
    model = Encoder(Model(width=8, layers=2, heads=HEADS, convolution=0, attention=full), 30, T)
    matrices = attention_matrices(model, np.arange(T))
    assert len(matrices) == 2
    assert all((each.sum(-1) - 1).abs().max() < 1e-5 and each.triu(1).any() for each in matrices)


def encoder(projection: str) -> TrainedModel:
    """Of inputs of 16 bytes."""
    attention = options("linformer", linformer={"projected": 4, "projection": projection})
    model = {"width": 8, "layers": 2, "heads": HEADS, "attention": attention.model_dump(exclude_unset=True)}
    recipe = Recipe.model_validate(
        {"objective": "masked", "model": model, "text": {"sequence_length": 16}, "training": {"steps": 1}}
    )
    return TrainedModel(build(recipe, 258), ByteTokenizer(), recipe, Path("run"))


def test_linformers_of_a_run_are_told_where_no_matrix_stands_for_them() -> None:
    text = TokenFile(np.arange(40), np.array([0]))
    (found,) = measure_spectra("run", encoder("linear"), text, [16], 2)
    assert found.texts == 2 and all((curves[:, 3] > 1 - 1e-6).all() for curves in found.cumulative)  # rank 4
    with pytest.raises(UsageError, match=r"32 tokens are more than the 16 .* Give shorter ones"):
        measure_spectra("run", encoder("mean"), text, [16, 32])
    with pytest.raises(UsageError, match=r"run: its Linformer projects by conv"):
        measure_spectra("run", encoder("conv"), text, [16])


def spectrum_of(length: int, **of_recipe: object) -> Spectrum:
    """That of three layers, those in the middle on blocks of four, looking at one text of so many tokens."""
    recipe = Recipe.model_validate({**of_recipe, "text": {"sequence_length": 16}, "training": {"steps": 1}})
    trained = TrainedModel(stirred(build(recipe, 258), 0.3), ByteTokenizer(), recipe, Path("run"))
    (found,) = measure_spectra("run", trained, TokenFile(np.arange(40), np.array([0])), [length], 2)
    return found


BLOCKS = {"width": 8, "layers": 3, "heads": HEADS, "downsample": {"factor": 4}}


def test_layers_that_read_blocks_have_smaller_matrices() -> None:
    alone = {"kind": "window", "window": 1}
    for length, blocks in [(16, 4), (19, 4), (4, 1)]:
        found = spectrum_of(length, model={**BLOCKS, "attention": alone})
        assert found.sizes == [length, blocks, length]
        for size, curves, needed, quarter in zip(
            found.sizes, found.cumulative, found.needed, found.quarter, strict=True
        ):
            assert np.abs(curves - np.arange(1, size + 1) / size).max() < 1e-12
            assert (needed == np.ceil(0.9 * size)).all()
            assert quarter == pytest.approx([max(size // 4, 1) / size] * HEADS)
    with pytest.raises(UsageError, match=r"--lengths: 3 tokens are fewer than a block of 4, .* Give longer ones"):
        spectrum_of(3, model={**BLOCKS, "attention": alone})


def test_those_of_an_encoder_too_though_the_last_be_filled_in_part() -> None:
    attention = {"kind": ["full", "linformer", "full"], "linformer": {"projected": 2}}
    for length, blocks in [(16, 4), (9, 3), (3, 1)]:
        found = spectrum_of(length, objective="masked", model={**BLOCKS, "attention": attention})
        assert found.sizes == [length, blocks, length]
        assert (found.cumulative[1][:, min(2, blocks) - 1] > 1 - 1e-6).all(), "two slots"


def command(*words: str) -> Result:
    return CliRunner().invoke(spectrum_command, [*words, "--device", "cpu"])


def test_the_command_tabulates_draws_and_writes_json(run: Path, tmp_path: Path) -> None:
    numbers, plot = tmp_path / "spectrum.json", tmp_path / "spectrum.png"
    words = ["--lengths", "16,32", "--texts", "4"]
    done = command(str(run), *words, "--json", str(numbers), "--plot", str(plot))
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


def test_what_cannot_be_measured_is_told(run: Path) -> None:
    done = command(str(run), "--lengths", "64k")
    assert isinstance(done.exception, UsageError)
    assert "fewer than 65,536. Give shorter lengths, or more text (--data)." in str(done.exception)
