"""A plug-in goes through every command: checked, trained, interrupted, resumed, measured and compared."""

import json
from pathlib import Path

import pytest
from commands import Finished
from commands import lmlong as call_lmlong
from machine import new_cache

from lmlong.attention.plugins import LOADED, load_plugin, unload_plugin
from lmlong.checkpoint import read
from lmlong.recipe import file as recipe_file
from lmlong.training.dry_run import dry_run

TWO_GATES = Path(__file__).parents[1] / "plugins" / "two_gates.py"

TINY = """\
text: {sources: [{kind: files, paths: [book.txt]}], tokenizer: {kind: bytes}, sequence_length: 32}
model: {width: 16, layers: 2, heads: 2, attention: {kind: [two_gates, linear], two_gates: {memory: 50}}}
training: {steps: 6, batch_size: 2, warmup_steps: 1, checkpoint_every: 2, log_every: 1, precision: "32"}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a plug-in, a recipe that lists it, and one that leaves it to --plugin."""
    folder = tmp_path_factory.mktemp("plugins")
    new_cache(folder)
    (folder / "book.txt").write_text("once upon a time there was a book. " * 100)
    (folder / "two_gates.py").write_bytes(TWO_GATES.read_bytes())
    (folder / "bare.yaml").write_text(TINY)
    (folder / "mine.yaml").write_text("plugins: [two_gates.py]\n" + TINY)
    return folder


def lmlong(folder: Path, *words: str) -> Finished:
    """Run a command, and unload its plug-ins afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LMLONG_CACHE", str(folder / "cache"))
        done = call_lmlong(*words, cwd=folder)
    for name in list(LOADED):
        unload_plugin(name)
    return done


def done(folder: Path, *words: str) -> str:
    result = lmlong(folder, *words)
    assert result.returncode == 0, result.stderr
    return result.stdout


PLUGIN = ("--plugin", "two_gates.py")


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    """A run that was stopped after its first half."""
    assert "two_gates, linear attention" in done(folder, "recipe", "check", "mine.yaml")
    done(folder, "train", "mine.yaml", "training.steps=4", "training.schedule=constant")
    return folder / "runs" / "mine"


def test_run_resumes_with_the_plugin(folder: Path, run: Path) -> None:
    options = ("training.schedule=constant", "training.steps=6")
    done(folder, "train", "bare.yaml", "name=mine", *options, *PLUGIN, "--resume", "auto")
    assert read.find(run).name == "step-00000006"


def test_commands_need_the_plugin_by_name(folder: Path, run: Path) -> None:
    refused = lmlong(folder, "generate", "mine", "--prompt", "once")
    assert refused.returncode == 4 and "Traceback" not in refused.stderr
    assert (
        "needs the attention two_gates of the plug-in two_gates.py: load it by --plugin FILE, or in" in refused.stderr
    )
    assert len(done(folder, "generate", "mine", "--prompt", "once", "--max-tokens", "9", *PLUGIN)) > 3
    assert "all laws kept" in done(folder, "check", "mine", *PLUGIN)
    about = json.loads(done(folder, "info", "mine", "--json", *PLUGIN))
    assert about["attention by layer"] == ["two_gates", "linear"]
    assert about["plug-ins"] == [str(folder / "two_gates.py")]
    assert "bits" in done(
        folder, "eval", "mine", "--lengths", "16", "--min-documents", "1", "--data", "book.txt", *PLUGIN
    )
    done(folder, "state", "build", "mine", "book.txt", "-o", "book.state", *PLUGIN)


def test_checkpoint_imports_no_file(folder: Path, run: Path) -> None:
    """Its plug-in runs when the user names it, and only then."""
    trap = folder / "trap.py"
    trap.write_text(f"open({str(folder / 'sprung')!r}, 'w').close()\n{TWO_GATES.read_text()}")
    done(folder, "train", "bare.yaml", "--plugin", "trap.py", "--out", "runs/trap", "training.steps=1")
    (folder / "sprung").unlink()
    for words in (["generate", "runs/trap"], ["info", "runs/trap"]):
        refused = lmlong(folder, *words)
        assert refused.returncode == 4 and "of the plug-in trap.py: load it by --plugin" in refused.stderr
    done(folder, "info", "runs/trap", *PLUGIN)  # the user's own file of the same attention
    assert not (folder / "sprung").exists()


@pytest.mark.slow
def test_dry_run_has_the_plugin(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LMLONG_CACHE", str(folder / "cache"))
        patch.chdir(folder)
        chosen = recipe_file.load("mine.yaml", (), load_plugin)
        assert dry_run(chosen).length == 32
    unload_plugin(folder / "two_gates.py")


def test_benchmarks_have_the_plugin(folder: Path) -> None:
    shape = ("quickstart", "model.heads=1", "model.width=8", "--lengths", "16", "--precisions", "32")
    assert "two_gates" in done(folder, "bench", "attention", *shape, *PLUGIN, "--only", "softmax,two_gates")


def test_check_finds_a_broken_plugin(folder: Path) -> None:
    assert "two_gates.py: TwoGates" in done(folder, "check", *PLUGIN)
    (folder / "broken.py").write_text(TWO_GATES.read_text().replace("return (weights * ", "return 2 * (weights * "))
    refused = lmlong(folder, "check", "--plugin", "broken.py")
    assert refused.returncode == 1 and "laws broken by broken.py: TwoGates" in refused.stdout
    (report,) = json.loads(lmlong(folder, "check", "--plugin", "broken.py", "--json").stdout)
    assert [law["number"] for law in report["laws"] if not law["kept"]] == [1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["recipe", "check", "bare.yaml"], "'two_gates' is not one of linear, delta, "),
        (["train", "bare.yaml", "--plugin", "gone.py"], "gone.py: cannot be read: No such file"),
        (["recipe", "check", "quickstart", "plugins=[gone.py]"], "plugins=[gone.py]: plugins.0: "),
        (["recipe", "check", "mine.yaml", "model.attention.two_gates.x=1"], "unknown key. Known here: memory."),
        (["recipe", "check", "mine.yaml", "objective=masked"], "two_gates has no encoder form"),
        (["info", "--plugin", "two_gate"], "two_gate: no installed package has an entry point of this name"),
        (["check"], "RUN and --plugin are missing"),
    ],
)
def test_mistake_is_one_message(folder: Path, words: list[str], message: str) -> None:
    refused = lmlong(folder, *words)
    assert message in refused.stderr
    assert "Traceback" not in refused.stderr
    assert refused.returncode == 2
