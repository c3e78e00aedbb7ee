"""The kernels of a run and of its model, with a planted kernel that is preferred to torch."""

from pathlib import Path

import pytest
from wrong_kernel import WrongDk

from lmlong.attention.linear.chunk import ChunkKernel
from lmlong.attention.linear.layer import LinearAttention
from lmlong.errors import UsageError
from lmlong.inference.loading import load
from lmlong.training.prepare import prepare_run
from lmlong.training.run import train

from .conftest import Recipes


def test_a_wrong_gradient_is_refused_before_the_first_step(
    recipe_of: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(LinearAttention, "kernels", {"torch": ChunkKernel, "bad": WrongDk})
    train(recipe_of("training.steps=1"), tmp_path / "run")
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("kernel")]
    assert lines == ["kernel: linear is computed by torch, since bad differs: dk is off by 2e-02"]
    assert load(tmp_path / "run", "cpu").model.attentions[0].kernel_name == "bad"  # its outputs are right


def test_a_kernel_that_no_attention_has_is_refused(recipe_of: Recipes) -> None:
    with pytest.raises(
        UsageError, match=r"training\.kernel: no attention of the model \(softmax\) has a kernel triton"
    ):
        prepare_run(recipe_of("training.kernel=triton", "model.attention.kind=softmax"))
