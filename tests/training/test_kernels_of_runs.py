"""The kernels of a run: in its checkpoints, when it resumes, and when its model is loaded. A CPU has a GPU's policy."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lmlong.attention.device_policy import GPU_POLICY
from lmlong.attention.linear.chunk import ChunkKernel
from lmlong.attention.linear.layer import LinearAttention
from lmlong.checkpoint import manifest, read
from lmlong.cli.info import info
from lmlong.errors import UsageError
from lmlong.evaluation.perplexity import evaluate
from lmlong.inference.loading import load
from lmlong.model import kernel_choice, kernel_trial
from lmlong.training.prepare import prepare_run
from lmlong.training.run import train

from .conftest import Recipes

SHORT = ("training.batch_size=1", "training.validation_tokens=100", "training.final_validation_tokens=0")


class Fast(ChunkKernel):
    name = "fast"


class Wrong(ChunkKernel):
    """A kernel whose outputs are wrong."""

    name = "wrong"

    def forward(self, x: Any, state: Any) -> Any:
        after = super().forward(x, state)
        x.y.mul_(1.1)
        return after


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose kernels as on a GPU, with fixed times."""

    def seconds(attention: Any, *_: object) -> float:
        return {"torch": 0.02, "fast": 0.01}[attention.kernel_name]

    monkeypatch.setattr(kernel_choice, "policy_of", lambda device: GPU_POLICY)
    monkeypatch.setattr(kernel_trial, "median_seconds", seconds)
    monkeypatch.setattr(LinearAttention, "kernels", {"torch": ChunkKernel, "fast": Fast, "wrong": Wrong})


def kernels_of(run: Path) -> Any:
    return manifest.read(read.find(run)).kernels


def reported(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("kernel")]


def test_a_run_on_a_cpu_reports_nothing(recipe_of: Recipes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for steps in (1, 2):
        train(recipe_of(*SHORT, f"training.steps={steps}"), tmp_path / "run", resume="auto")
    load(tmp_path / "run", "cpu")
    assert not reported(capsys)
    assert kernels_of(tmp_path / "run") == {"names": {"linear": "native"}, "chosen_by": "the default of a CPU"}


def test_a_run_keeps_the_kernels_that_it_has_chosen(
    on_a_gpu: None,
    recipe_of: Recipes,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, steps = tmp_path / "run", iter(range(1, 9))

    def lines() -> list[str]:
        train(recipe_of(*SHORT, f"training.steps={next(steps)}"), run, resume="auto")
        return reported(capsys)

    (line,) = lines()
    assert line.startswith("kernel: linear by fast (10 ms; torch 20 ms; wrong disagrees: d")
    assert kernels_of(run)["names"] == {"linear": "fast"} and "precision 32" in kernels_of(run)["chosen_by"]
    assert lines() == ["kernel: linear by fast (as in the checkpoint)"]
    assert load(run, "cpu").model.kernel_names == {"linear": "fast"} and not reported(capsys)
    facts = json.loads(CliRunner().invoke(info, [str(run), "--json"], catch_exceptions=False).stdout)
    assert facts["trained by kernels"] == {"linear": "fast"} and "precision 32" in facts["kernels chosen by"]
    assert facts["kernels here"] == {"linear": "fast"}
    monkeypatch.setattr(Fast, "unavailable_reason", classmethod(lambda *_: "it needs another GPU"))
    (line,) = lines()
    assert line.startswith("kernel: linear by torch (20 ms; wrong disagrees")
    assert "; the checkpoint has linear by fast (" in line
    assert kernels_of(run)["names"] == {"linear": "torch"}
    facts = json.loads(CliRunner().invoke(info, [str(run), "--json"], catch_exceptions=False).stdout)
    assert facts["kernels not usable here"]["linear by fast"] == "it needs another GPU"


def test_a_loaded_model_has_kernels_for_each_number_format(
    recipe_of: Recipes, tmp_path: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    train(recipe_of(*SHORT, "training.steps=1"), tmp_path / "run")
    request.getfixturevalue("on_a_gpu")
    capsys.readouterr()
    loaded = load(tmp_path / "run", "cpu")
    assert loaded.model.kernel_names == {"linear": "fast"}
    (line,) = reported(capsys)
    assert line.startswith("kernel: linear by fast (10 ms; torch 20 ms; wrong disagrees")
    load(tmp_path / "run", "cpu")
    assert not reported(capsys)
    for _ in range(2):
        evaluate(loaded, texts="the cat sat", lengths=[4], min_documents=1, precision="bf16")
    assert len(reported(capsys)) == 1
    loaded.model.use_kernel("torch")
    evaluate(loaded, texts="the cat sat", lengths=[4], min_documents=1)
    assert loaded.model.kernel_names == {"linear": "torch"}


def test_a_kernel_set_by_name_is_stored_and_not_tried(
    on_a_gpu: None, recipe_of: Recipes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(recipe_of(*SHORT, "training.steps=1", "training.kernel=torch"), tmp_path / "run")
    assert not reported(capsys)
    assert kernels_of(tmp_path / "run") == {"names": {"linear": "torch"}, "chosen_by": "training.kernel"}


def test_a_kernel_that_no_attention_has_is_refused(recipe_of: Recipes) -> None:
    with pytest.raises(
        UsageError, match=r"training\.kernel: no attention of the model \(softmax\) has a kernel triton"
    ):
        prepare_run(recipe_of("training.kernel=triton", "model.attention.kind=softmax"))
