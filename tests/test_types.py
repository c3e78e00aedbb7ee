"""A user's file under mypy: every public name has its type, and each wrong use is an error, without any plug-in."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

RIGHT = """
from pathlib import Path

import torch
from typing_extensions import assert_type

import lmlong

recipe = lmlong.Recipe.load("quickstart", {"training.steps": 100})
assert_type(recipe, lmlong.Recipe)
assert_type(lmlong.Recipe.load({"training": {"steps": 3}}).training.steps, int | None)
result = lmlong.train(recipe, out=Path("runs") / "short", resume="auto")
assert_type(result, lmlong.TrainingResult)
assert_type(result.run, Path)
assert_type(result.losses, dict[int, float])
if result.validation is not None:
    assert_type(result.validation.bits_per_byte, float)
model = lmlong.load(result.run, weights="bf16")
assert_type(model, lmlong.TrainedLanguageModel)
text: str = "".join(model.stream("def ", max_tokens=10))
hidden = model.hidden_states("def ", blocks=True)
assert_type(hidden, lmlong.HiddenStates)
assert_type(hidden.last, torch.Tensor)
assert_type(hidden.blocks, tuple[torch.Tensor, ...])
assert_type([piece.last for piece in model.stream_hidden_states(open("book.txt"))], list[torch.Tensor])
report = lmlong.evaluate(model, texts=["one", "two"], lengths=[16, 32], views=["context"])
assert_type(report, lmlong.PerplexityReport)
assert_type(report.context[0].sums.totals.perplexity, float)
lmlong.evaluate("runs/short", ["a.txt", Path("b.txt")])
own = lmlong.LanguageModel(recipe.model, vocabulary=256)
tokens = torch.zeros(1, 8, dtype=torch.long)
hidden_states, after = own(tokens)
assert_type(own.loss(hidden_states, tokens), torch.Tensor)
loss, _ = lmlong.text_loss(own, tokens, tokens, segment=4)
assert_type(loss, torch.Tensor)
logits, state = own.step(tokens[:, 0], lmlong.detach_state(after))


class Square(lmlong.FeatureMap):
    def query(self, q: torch.Tensor) -> torch.Tensor:
        return q.square() + 1e-4


attention: lmlong.CausalAttention = lmlong.LinearAttention(2, 16, 16, Square(16))  # type: ignore[type-arg]
for attention in (lmlong.WindowAttention(2, 16, 16, 8), lmlong.SoftmaxAttention(2, 16, 16)):
    assert_type(attention.state_numbers(100), int)

try:
    lmlong.recipe.Training(steps=3)
except lmlong.errors.RecipeError as error:
    assert_type(error.mistakes, list[str])
except lmlong.LmlongError as other:
    print(other)
"""

WRONG = """
import torch

import lmlong
from lmlong.recipe import Attention, Favor, Files, Model, Recipe, Text, Tokenizer, Training

text = Text(sources=[Files(kind="files", paths=["a.txt"])], tokenizer=Tokenizer(kind="bytes"))
Recipe(text=text, training=Training(steps=3, precision="32"), modle=1)  # type: ignore[call-arg]
Training(steps="three")  # type: ignore[arg-type]
Training(steps=3, precision="64")  # type: ignore[arg-type]
Text(sources=[Files(kind="files")])  # type: ignore[call-arg]
Model(width=64, attention=Attention(kind=["linear", "window"], window=8, favor=Favor(features=8)))
Model(widht=64)  # type: ignore[call-arg]
Attention(decay="sometimes")  # type: ignore[arg-type]
lmlong.lode  # type: ignore[attr-defined]
lmlong.load(3)  # type: ignore[arg-type]
lmlong.load("x", weights="fp8")  # type: ignore[arg-type]
lmlong.train("quickstart")  # type: ignore[arg-type]
recipe = lmlong.Recipe.load("quickstart", ["training.steps=3"])  # type: ignore[arg-type]
lmlong.train(recipe, resume=True)  # type: ignore[arg-type]
lmlong.train(recipe).validation.bits_per_byte  # type: ignore[union-attr]
lmlong.evaluate("x", views=["contxt"])  # type: ignore[list-item]
lmlong.evaluate("x", lengths="16,32")  # type: ignore[arg-type]
model = lmlong.load("x")
model.hidden_states(["a", 3])  # type: ignore[list-item]
model.hidden_states("a").layers  # type: ignore[attr-defined]
model.generat  # type: ignore[attr-defined]
lmlong.LanguageModel(recipe, 256)  # type: ignore[arg-type]


class NoMap(lmlong.FeatureMap): ...


NoMap(3)  # type: ignore[abstract]
lmlong.LinearAttention(2, 16, 16, "elu")  # type: ignore[arg-type]
"""


FASTER = """
[mypy]
[mypy-lightning.*,deepspeed.*,datasets.*,sympy.*,torch._dynamo.*,torch._inductor.*,torch.ao.*,torch.distributed.*,\
torch.export.*,torch.fx.*,torch.testing.*]
follow_imports = skip
"""
"""Libraries and parts of torch in which no public name has its type; mypy takes most of its time for them."""


@pytest.mark.parametrize("settings", [FASTER, pytest.param("[mypy]", marks=pytest.mark.slow)], ids=["faster", "whole"])
def test_a_users_files_have_types(tmp_path: Path, settings: str) -> None:
    """A `type: ignore` that is not needed is a mistake too."""
    files = {"right.py": RIGHT, "wrong.py": WRONG}
    for name, text in {"mypy.ini": settings, **files}.items():
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--cache-dir", tmp_path / "cache", *files],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        env={name: value for name, value in os.environ.items() if name != "MYPYPATH"},
    )
    assert done.stdout + done.stderr == ""
