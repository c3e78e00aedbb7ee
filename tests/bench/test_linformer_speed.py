"""What Linformer saves: which shapes are measured, memory in closed form, what is said of it."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from lmlong.bench import linformer_speed as linformer
from lmlong.bench.linformer_grid import LinformerGrid
from lmlong.bench.linformer_report import figure, table
from lmlong.bench.linformer_speed import (
    EncoderLayer,
    LinformerCost,
    LinformerResult,
    build_candidate,
    run_linformer_benchmark,
)
from lmlong.cli.bench import bench
from lmlong.errors import UsageError
from lmlong.report.plot import draw

CPU = torch.device("cpu")
TINY = LinformerGrid(lengths=(16, 64), slots=(8, 32), width=8, heads=2, rows=2)
WORDS = ["--lengths", "16,64", "--slots", "8,32", "--width", "8", "--heads", "2"]

MEASURED = [
    LinformerResult(
        "attention", 512, {"full": LinformerCost([4.0, 8.0, 6.0], 100), "128": LinformerCost([2.0, 2.0, 3.0], 50)}, 1000
    ),
    LinformerResult("attention", 65_536, {"128": LinformerCost([4.0, 4.0, 4.0], 200)}, 400_000),
    LinformerResult(
        "layer", 512, {"full": LinformerCost([4.0, 4.0, 4.0], 100), "128": LinformerCost([8.0, 8.0, 8.0], 100)}, 150
    ),
    LinformerResult("layer", 65_536, {"128": LinformerCost([4.0, 4.0, 4.0], 200)}, 400_000),
]
GRID = LinformerGrid(lengths=(512, 65_536), slots=(128,))


def test_every_shape_is_measured_in_which_slots_are_no_more_than_tokens() -> None:
    found = run_linformer_benchmark(TINY, CPU)
    assert [(each.part, each.length, list(each.costs)) for each in found] == [
        ("attention", 16, ["full", "8"]),
        ("attention", 64, ["full", "8", "32"]),
        ("layer", 16, ["full", "8"]),
        ("layer", 64, ["full", "8", "32"]),
    ]
    assert all(second > 0 for each in found for cost in each.costs.values() for second in cost.seconds)


def test_memory_of_the_attention_alone_in_closed_form() -> None:
    """Weights twice, as scores and after their softmax; fused, the outputs and a sum for each query."""
    found = run_linformer_benchmark(TINY, CPU)[1]
    part = 64 * 8 * 4  # queries, keys, values or outputs of a row
    assert found.matrix_row_bytes == 3 * part + 2 * 4 * 2 * 64 * 64
    assert found.costs["full"].row_bytes == 3 * part + part + 4 * 2 * 64
    slots = 32 * 8 * 4
    assert found.costs["32"].row_bytes < 3 * part + part + 4 * 2 * 64 + 4 * slots
    assert found.rows("full") == found.matrix_row_bytes / found.costs["full"].row_bytes


def test_full_attention_is_left_out_beyond_the_limit_and_from_there_on() -> None:
    grid = LinformerGrid(lengths=(16, 2048, 4096), slots=(8,), width=8, heads=2, limit=0.0)
    names = [list(each.costs) for each in run_linformer_benchmark(grid, CPU)]
    assert names == [["full", "8"], ["8"], ["8"]] * 2
    assert "full" in run_linformer_benchmark(grid._replace(lengths=(2048,), limit=60.0), CPU)[0].costs


@pytest.mark.parametrize("name", ["full", "32"])
def test_a_layer_is_norm_attention_norm_and_mlp(name: str) -> None:
    torch.manual_seed(0)
    layer, attention = EncoderLayer(8, 2).double(), build_candidate(TINY, 64, name).double()
    x = torch.randn(2, 64, 8, dtype=torch.float64)

    def heads(part: torch.Tensor) -> torch.Tensor:
        return part.reshape(2, 64, 2, 4).transpose(1, 2)

    normal = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    q, k, v = (normal @ weight.T for weight in layer.in_proj.weight.split(8))
    y = attention.reference(heads(q), heads(k), heads(v)).transpose(1, 2).reshape(2, 64, 8)
    y = x + y @ layer.out_proj.weight.T
    inner = y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() @ layer.widen.weight.T
    truth = y + torch.nn.functional.gelu(inner) @ layer.narrow.weight.T
    assert (layer(x, attention) - truth).abs().max() < 1e-12


def test_ratios_are_of_passes_in_the_same_round() -> None:
    first, second, *_ = MEASURED
    assert first.times_as_fast("128") == 2.0  # the median of 4 / 2, 8 / 2 and 6 / 3
    assert first.rows("128") == 20
    assert second.times_as_fast("128") != second.times_as_fast("128")  # not a number
    assert first.costs["full"].quartiles == [5.0, 6.0, 7.0]


def test_the_table_shows_ratios_and_what_they_are_made_of() -> None:
    text = table(GRID, "1 thread of a machine", MEASURED)
    lines = [line.split() for line in text.splitlines()]
    assert ["512", "2.00", "10.0", "20.0"] in lines
    assert ["65,536", "-", "-", "2,000"] in lines
    assert ["512", "0.50", "1.50", "1.50"] in lines
    assert ["65,536", "-", "61.0", "±", "0%"] in lines
    assert ["512", "11,718.8", "±17%", "3,906.2", "±12%"] in lines
    assert "- left out: a pass would take longer than 20 seconds (--limit)" in text
    assert "left out" not in table(GRID, "a machine", MEASURED[::2])


def test_the_table_fits_a_terminal() -> None:
    seconds = [0.5, 1.0, 200.0]
    costs = {name: LinformerCost(seconds, 10**9) for name in ("full", "128", "256", "512", "1024")}
    text = table(LinformerGrid(), "2 threads of AMD EPYC", [LinformerResult("layer", 65_536, costs, 10**12)])
    assert max(map(len, text.splitlines())) <= 80


def test_the_chart_has_a_line_for_each_attention() -> None:
    panels = draw(figure(GRID, MEASURED)).axes
    assert [axes.get_title() for axes in panels] == ["attention alone", "whole layer"]
    lines = {line.get_label(): line for line in panels[0].lines}
    assert list(lines["k = 128"].get_xdata()) == [512, 65_536] and list(lines["full"].get_xdata()) == [512]
    assert lines["full"].get_ydata()[0] == pytest.approx(6 / 512 * 1e6)


def run(*words: str) -> Result:
    return CliRunner().invoke(bench, ["linformer", *words])


def test_the_command_tabulates_draws_and_writes_json(tmp_path: Path) -> None:
    numbers, plot = tmp_path / "cost.json", tmp_path / "cost.png"
    done = run(*WORDS, "--json", str(numbers), "--plot", str(plot), "--device", "cpu")
    assert done.exit_code == 0, done.output
    assert plot.read_bytes().startswith(b"\x89PNG")
    written = json.loads(numbers.read_text())
    assert (written["width"], written["lengths"], written["slots"]) == (8, [16, 64], [8, 32])
    last = written["measured"][-1]
    assert [cost["slots"] for cost in last["costs"]] == [None, 8, 32]
    shown = [line.split() for line in done.stdout.splitlines() if line.startswith("     64")][2]
    assert float(shown[3]) == pytest.approx(last["matrix_row_bytes"] / last["costs"][0]["row_bytes"], rel=0.01)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--slots", "x"], "--slots: 'x' is not a list of numbers. Write it like 8,16."),
        (["--slots", "0"], "--slots: 0 cannot be used. Give numbers above 0."),
        (["--slots", "128"], "--slots: 128 are more than the 64 tokens of the longest input"),
        (["--heads", "3"], "--heads: 3 do not divide a width of 8. Use a divisor."),
        (["--lengths", "1x"], "--lengths: '1x' is not a length"),
        (["--plot", "a.jpeg"], "a.jpeg: cannot be drawn"),
    ],
)
def test_mistakes_are_told_before_anything_is_measured(
    words: list[str], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linformer, "run_linformer_benchmark", None)
    done = run(*WORDS, *words)
    assert isinstance(done.exception, UsageError), done.output
    assert complaint in str(done.exception)
