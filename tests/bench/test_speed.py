"""Speed benchmarks: bytes against closed forms, passes in turns, what is left out, the ratios, and the commands."""

import json
import time
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from grids import every_nth
from torch.testing import assert_close

from lmlong.attention.inputs import Gate
from lmlong.bench.candidates import attention_candidate, build_attention, build_model, training_candidate
from lmlong.bench.speed import Candidate, Result, Title, crossovers, forecast, ratio, run_benchmark, speed_report
from lmlong.bench.timer import MAX_ROUNDS, MIN_ROUNDS, peak_bytes, time_rounds
from lmlong.cli.bench import bench
from lmlong.recipe import file as recipe_file
from lmlong.recipe.kinds import candidates

CPU = torch.device("cpu")
ATTENTIONS = tuple(candidates())
TITLE = Title("work", "machine", "bytes", lambda one: one.peak)


def result(name: str, length: int, seconds: list[float]) -> Result:
    return Result(name, "32", length, length, seconds, least=100, peak=150)


def test_ratios_and_where_they_cross() -> None:
    """A square and a line, which cross where n is 1,000."""
    square, line = (
        [result(name, n, [seconds(n)]) for n in (256, 1024, 4096)]
        for name, seconds in (("softmax", lambda n: n**2 * 1e-9), ("elu", lambda n: n * 1e-6))
    )
    assert ratio([*square, *line], line[-1]) == pytest.approx(4.096)
    assert crossovers([*square, *line]) == {"softmax": "", "elu": "1,000"}
    assert crossovers([square[-1], line[-1]])["elu"] == "< 4k"
    assert crossovers([square[0], line[0]])["elu"] == "> 256"


def test_what_takes_too_long_is_left_out() -> None:
    def build(name: str, precision: str, length: int) -> Candidate:
        # a square that would take years at the last length: were it started, this test would not end
        work = (lambda: torch.zeros(length).sum()) if length < 2**40 else (lambda: pytest.fail("was started"))
        return Candidate(work, length, 0, 0, growth=2 if name == "softmax" else 0)

    results = run_benchmark(build, ["softmax", "elu"], ["32"], [16, 2**20], CPU, limit=1e3)
    assert [(one.name, one.length) for one in results] == [("softmax", 16), ("elu", 16), ("elu", 2**20)]
    ahead = build("softmax", "32", 2**20)
    assert forecast(results[:1], "softmax", "32", ahead) > 1e3
    assert forecast(results, "softmax", "bf16", ahead) == 0  # of which nothing is known
    assert "- left out" in speed_report(TITLE, {}, results).text()


@every_nth(4, pytest.mark.parametrize("name", ATTENTIONS))
def test_attention_is_measured_forward_and_backward(name: str) -> None:
    ready = attention_candidate(name, "32", 40, 2, 8, CPU)
    attention = build_attention(name, 2, 8)
    gates = sum(gate.start.numel() for gate in attention.inputs.values() if isinstance(gate, Gate))
    tensors = 4 if attention.has_keys else 2  # queries and keys, and values and outputs
    assert ready.io_bytes == 2 * 4 * 40 * (tensors * 2 * 8 + gates)
    assert all(bool(x.any()) for x in ready.call())  # type: ignore[attr-defined]


SMALL = ["model.width=16", "model.heads=2", "model.layers=1"]


def test_models_read_by_the_kernel_of_the_recipe() -> None:
    losses = []
    for kernel in ("auto", "torch"):
        options = recipe_file.load("quickstart", [*SMALL, "text.tokenizer.vocabulary=300", f"training.kernel={kernel}"])
        kernels = [attention.kernel_name for attention in build_model("elu", options, CPU).attentions]
        assert kernels == ["torch" if kernel == "torch" else "native"]
        losses.append(training_candidate("elu", "32", 40, options, CPU).call())
    assert_close(*losses, rtol=1e-5, atol=0)


def test_tables_fit_a_terminal() -> None:
    results = [result(name, n, [n * 1e-6, n * 2e-6]) for name in ATTENTIONS for n in (256, 2**20)]
    text = speed_report(TITLE, {}, results).text()
    assert max(map(len, text.splitlines())) <= 80
    assert all(name in text for name in ATTENTIONS) and "in float32, times as fast as softmax" in text


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("attention", ["--precisions", "32,bf16"]),
        pytest.param("attention", ["--precisions", "64"], marks=pytest.mark.slow),
        ("train", []),
        ("generate", ["--precisions", "int8"]),
    ],
)
def test_benchmark_writes_table_json_and_chart(command: str, options: list[str], tmp_path: Path) -> None:
    written, drawn = tmp_path / "speed.json", tmp_path / "speed.png"
    common = ["--lengths", "16,32", "--only", "softmax,elu-learned", "--json", str(written), "--plot", str(drawn)]
    done = CliRunner().invoke(bench, [command, "quickstart", *SMALL, *options, *common], catch_exceptions=False)
    assert done.exit_code == 0 and "times as fast as softmax" in done.stdout
    assert drawn.stat().st_size > 10_000
    found = json.loads(written.read_text())["results"]
    assert sorted({(one["name"], one["length"]) for one in found}) == [
        *(("elu-learned", 16), ("elu-learned", 32)),
        *(("softmax", 16), ("softmax", 32)),
    ]
    assert all(one["peak"] > 0 and one["tokens_per_second"] > 0 for one in found)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--only", "sofmax"], "--only: there is no 'sofmax'. Did you mean 'softmax'?"),
        (["--only", "softmax,linear"], "--only: linear has several forms. Choose from elu, relu, "),
        (["--precisions", "int8"], "--precisions: there is no 'int8'"),
        (["--lengths", "4x"], "--lengths: '4x' is not a length"),
        (["--plot", "speed.txt"], "speed.txt: cannot be drawn"),
    ],
)
def test_mistakes_are_reported_first(options: list[str], says: str) -> None:
    done = CliRunner().invoke(bench, ["attention", *options])
    assert done.exit_code != 0 and says in str(done.exception)


KILO = 4000  # bytes of a thousand floats


def test_what_is_held_is_what_is_there_at_one_time() -> None:
    x = torch.zeros(1000)

    def chained() -> torch.Tensor:
        y = x + 1
        for _ in range(5):
            y = y + 1  # the one before is there until this one is
        return y

    assert peak_bytes(chained, CPU) == 2 * KILO
    assert peak_bytes(lambda: [x + 1, x + 2, x + 3], CPU) == 3 * KILO
    assert peak_bytes(lambda: torch.cat([x, x]) @ torch.cat([x, x]), CPU) == 4 * KILO + 4


def test_inputs_and_views_of_them_are_not_held() -> None:
    x = torch.zeros(10, 100)
    assert peak_bytes(lambda: x.T[:5].unflatten(0, (5, 1)), CPU) == 0
    assert peak_bytes(lambda: x.add_(1), CPU) == 0
    assert peak_bytes(lambda: (x + 1).T[:1], CPU) == KILO  # a view keeps all of what it views


def test_shapes_alone_are_counted_alike() -> None:
    x = torch.zeros(10**6, device="meta")
    assert peak_bytes(lambda: (x * 2).exp(), torch.device("meta")) == 2000 * KILO


def test_every_round_has_all_passes_in_turn() -> None:
    done: list[str] = []
    seconds = time_rounds({name: lambda name=name: done.append(name) for name in "abc"}, CPU)  # type: ignore[misc]
    assert MIN_ROUNDS <= len(seconds["a"]) <= MAX_ROUNDS
    assert done == list("abc") * len(seconds["a"])
    assert {len(rounds) for rounds in seconds.values()} == {len(seconds["a"])}


def test_passes_that_take_long_have_few_rounds() -> None:
    assert len(time_rounds({"a": lambda: time.sleep(0.001)}, CPU)["a"]) == MAX_ROUNDS
    assert len(time_rounds({"a": lambda: time.sleep(0.001)}, CPU, max_seconds=0.0)["a"]) == MIN_ROUNDS
