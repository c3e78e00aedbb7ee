"""The public names as a user of Python meets them: in a script, a thread, a notebook, an editor and a type checker.

The examples of every docstring and every block of docs/guides/python.md are run.
"""

import ast
import doctest
import inspect
import io
import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from machine import new_cache

import lmlong

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "guides" / "python.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)

MINE = """
text:
  sources: [{kind: files, paths: [my-book.txt]}]
  tokenizer: {kind: bytes}
  sequence_length: 64
model: {width: 32, layers: 2, heads: 2, attention: {kind: linear}}
training: {steps: 30, batch_size: 2, learning_rate: 1e-2, warmup_steps: 2, precision: "32"}
"""
OF_WORDS = [("triumph", "pos"), ("failure", "neg")]
WORDS = ["the", "a", "cat", "dog", "bird", "sat", "ran", "flew", "on", "under", "over", "mat", "tree", "and", "then"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_cache(tmp_path_factory.mktemp("public"))


@pytest.fixture
def here(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with a book and a recipe for it."""
    draw = random.Random(0)
    for name in ("my-book.txt", "book.txt"):
        (tmp_path / name).write_text("\n".join(" ".join(draw.choices(WORDS, k=9)) for _ in range(300)))
    (tmp_path / "mine.yaml").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LMLONG_CACHE", str(cache))
    return tmp_path


def test_public_names_are_listed() -> None:
    (checked,) = [node for node in ast.parse(inspect.getsource(lmlong)).body if isinstance(node, ast.If)][:1]
    imported = {alias.name for node in checked.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert {*imported, "errors", "LmlongError"} == set(lmlong.__all__)
    assert list(lmlong.__all__) == sorted(lmlong.__all__)
    for name in lmlong.__all__:
        assert inspect.getdoc(getattr(lmlong, name)), name
    assert set(lmlong.__all__) <= set(dir(lmlong))
    with pytest.raises(AttributeError, match=r"^module 'lmlong' has no attribute 'lode'$"):
        lmlong.lode  # type: ignore[attr-defined]  # noqa: B018


def test_torch_is_imported_when_it_is_needed() -> None:
    code = """
import sys, lmlong
dir(lmlong), lmlong.errors.RecipeError
assert not {"torch", "pydantic", "numpy"} & set(sys.modules)
lmlong.Recipe.load("quickstart", {"training.steps": 3}), lmlong.recipe.Model()
assert "torch" not in sys.modules
lmlong.LinearAttention, lmlong.LanguageModel
assert "lightning" not in sys.modules
assert "torch._dynamo" not in sys.modules, "the compiler takes as long to import as torch itself"
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


class Shown(doctest.OutputChecker):
    """An example that shows no output is run for its own sake."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return not want or super().check_output(want, got, optionflags)


def examples() -> Iterator[doctest.DocTest]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    yield doctest.DocTestParser().get_doctest(lmlong.__doc__ or "", {}, "lmlong", None, 0)
    for name in lmlong.__all__:
        value = getattr(lmlong, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            yield from (test for test in finder.find(value, f"lmlong.{name}") if test.examples)


def test_examples_of_docstrings_run(here: Path) -> None:
    found = list(examples())
    shown = {test.name.removeprefix("lmlong.") for test in found}
    assert {"train", "evaluate", "load", "Recipe.load", "TrainedLanguageModel.hidden_states"} <= shown
    lmlong.train(lmlong.Recipe.load("mine.yaml"), "runs/quickstart")
    reviews = [{"text": f"A {word} of {number}.", "label": label} for number in range(30) for word, label in OF_WORDS]
    Path("reviews.jsonl").write_text("".join(json.dumps(review) + "\n" for review in reviews))
    source = {"paths": ["reviews.jsonl"]}
    labels = {"objective": "label", "text.sources": [source], "text.validation.sources": [source]}
    lmlong.train(lmlong.Recipe.load("mine.yaml", labels), "runs/reviews")
    model = lmlong.load("runs/quickstart")
    runner = doctest.DocTestRunner(Shown())
    told = io.StringIO()
    for test in found:
        test.globs = {"lmlong": lmlong, "model": model, "book": model.read("It was a dark night.")}
        runner.run(test, out=told.write)
    assert not runner.summarize(verbose=False).failed, told.getvalue()


def run_page() -> dict[str, str]:
    """Run the blocks of the page, and return what each prints."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    told = {}
    for number, block in enumerate(BLOCKS):
        with redirect_stdout(io.StringIO()) as output:
            exec(compile(block, f"docs/guides/python.md, block {number + 1}", "exec"), namespace)
        told[block] = output.getvalue()
    return told


def test_page_runs_in_a_thread_and_its_short_loop_learns(here: Path) -> None:
    with ThreadPoolExecutor(1) as threads:
        told = threads.submit(run_page).result(timeout=300)
    assert list((here / "runs" / "mixed" / "checkpoints").iterdir())
    loop, generation = (block for block in BLOCKS if "own" in block)
    assert len([line for line in loop.splitlines() if line]) <= 15
    nats, _, rest = told[loop].partition(" nats a byte\n")
    assert float(nats) < 3.2 and not rest  # ln 256 is 5.5
    assert len(told[generation]) == 100


@pytest.mark.interop
def test_stop_button_of_a_notebook_saves(here: Path) -> None:
    client = pytest.importorskip("jupyter_client")
    pytest.importorskip("ipykernel")
    manager, channels = client.manager.start_new_kernel(kernel_name="python3", cwd=str(here))
    try:

        def cell(code: str, interrupt_at: str = "") -> dict[str, Any]:
            def shown(message: dict[str, Any]) -> None:
                nonlocal interrupt_at
                if interrupt_at and interrupt_at in message["content"].get("text", ""):
                    interrupt_at = ""
                    manager.interrupt_kernel()

            return channels.execute_interactive(code, timeout=120, output_hook=shown)["content"]

        assert cell("import lmlong\nrecipe = lmlong.Recipe.load('mine.yaml', {'training.steps': 1000})")
        stopped = cell("lmlong.train(recipe)", interrupt_at="step 100/1000")
        assert (stopped["status"], stopped["ename"]) == ("error", "KeyboardInterrupt")
        assert re.fullmatch(
            r"stopped after step \d+, saved in runs/mine; resume='auto' continues it", stopped["evalue"]
        )
        step = int(re.findall(r"step (\d+)", stopped["evalue"])[0])
        assert 100 <= step < 1000
        going_on = (
            f"lmlong.train(lmlong.Recipe.load('mine.yaml', {{'training.steps': {step + 1}}}), resume='auto').step"
        )
        assert cell(f"assert {going_on} == {step + 1}")["status"] == "ok"
        waiting = cell("import time\nprint('waiting')\ntime.sleep(60)", interrupt_at="waiting")
        assert (waiting["status"], waiting["ename"]) == ("error", "KeyboardInterrupt")
    finally:
        channels.stop_channels()
        manager.shutdown_kernel(now=True)
