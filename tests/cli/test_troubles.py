"""Ordinary troubles of a machine: each is one message with path and remedy, and the right exit code."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from commands import Finished
from commands import lmlong as call_lmlong
from machine import largest_file, new_cache

RECIPE = """
text: {{sources: [{{kind: files, paths: [{book}]}}], tokenizer: {{kind: bytes}}, sequence_length: 16}}
model: {{width: 16, layers: 1, heads: 2}}
training: {{steps: 2, batch_size: 2, precision: "32", log_every: 1}}
"""

Command = Callable[..., Finished]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a book, a recipe, and a run of two steps."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "book.txt").write_text("once upon a time there was a book. " * 60)
    (folder / "mine.yaml").write_text(RECIPE.format(book=folder / "book.txt"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LMLONG_CACHE", str(new_cache(folder)))
        assert call_lmlong("train", "mine.yaml", "--out", "run", cwd=folder).returncode == 0
        yield folder


@pytest.fixture
def lmlong(place: Path) -> Command:
    return partial(call_lmlong, cwd=place)


def shell(place: Path, line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A line of a shell in which `lmlong` is the command."""
    line = f'lmlong() {{ {shlex.quote(sys.executable)} -m lmlong "$@"; }}\n{line}'
    return subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, timeout=60, cwd=place, env={**os.environ, **environment}
    )


EVAL = ("eval", "run", "--lengths", "8", "--min-documents", "1", "--by", "position")


def test_full_disk_of_json_and_plots_is_reported(lmlong: Command, place: Path) -> None:
    (place / "full.png").symlink_to("/dev/full")
    for words, file in ((("--json", "/dev/full"), "/dev/full"), (("--plot", "full.png"), "full.png")):
        code, _, told = lmlong(*EVAL, *words)
        assert (
            code == 1
            and told.strip()
            == f"error: {file}: No space left on device. Free some space, or choose a path on another disk."
        )
    code, output, told = lmlong(*EVAL, "--json", "/proc/results.json")
    assert (code, output) == (2, "") and told.startswith("error: /proc/results.json: "), "refused first"


def test_full_disk_of_tokens_is_reported(lmlong: Command, place: Path) -> None:
    with largest_file(100):
        code, _, told = lmlong("data", "info", "mine.yaml", "text.validation.fraction=0.3")
    assert code == 1 and told.startswith(f"error: {place}/cache/"), told
    assert "File too large. Set LMLONG_CACHE to a folder of your own" in told


def test_full_disk_of_checkpoints_is_reported(lmlong: Command, place: Path) -> None:
    with largest_file(4000):
        code, _, told = lmlong("train", "mine.yaml", "--out", "full")
    assert code == 1 and "error: full/checkpoints/step-00000001: File too large." in told
    with largest_file(4000):
        code, _, told = lmlong("generate", "run", "--prompt", "a", "--max-tokens", "1", "--save-state", "a.state")
    assert (code, told) == (
        1,
        "error: a.state: File too large. Raise the limit of file sizes (ulimit -f), or choose another disk.\n",
    )
    assert not list(place.glob("*.state")) and not list(place.glob(".*partial"))


STREAMS = {
    "lmlong recipe options > /dev/full": (1, "error: standard output: No space left on device."),
    "lmlong recipe check nosuch 2>&-": (2, ""),
    "lmlong recipe list <&-": (0, ""),
}


@pytest.mark.parametrize("line", STREAMS)
def test_full_or_closed_streams_are_reported(place: Path, line: str) -> None:
    done = shell(place, line)
    code, message = STREAMS[line]
    assert done.returncode == code and done.stderr.startswith(message) and "Traceback" not in done.stderr, done.stderr
    assert not done.stderr if not message else done.stderr.count("\n") == 1
    assert bool(done.stdout) == ("list" in line)  # messages never go to standard output


def test_text_is_written_without_other_streams(place: Path) -> None:
    done = shell(place, "lmlong generate run --prompt a --max-tokens 3 --stats 2>/dev/full <&-")
    assert (done.returncode, done.stderr) == (0, "")
    assert 0 < len(done.stdout) <= 12


def test_cache_that_is_a_file_is_refused(lmlong: Command, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMLONG_CACHE", str(place / "book.txt"))
    code, _, told = lmlong("data", "info", "mine.yaml")
    assert code == 2 and f"error: {place}/book.txt/tokens/" in told and "Not a directory. Set LMLONG_CACHE" in told


def test_missing_home_is_not_created(lmlong: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))
    monkeypatch.delenv("LMLONG_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert lmlong("data", "info", "mine.yaml") == (
        2,
        "",
        "error: there is no home folder for the cache. Set LMLONG_CACHE to a folder of your own.\n",
    )
    assert Path(os.environ["XDG_CACHE_HOME"]).is_dir()  # for libraries that would make a home
    assert os.environ["XDG_CONFIG_HOME"] == str(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("override", "limit"),
    [
        ("model.attention.window=9223372036854775807", "2147483648"),
        ("training.learning_rate=1e300", "1e+30"),
    ],
)
def test_huge_values_are_refused(lmlong: Command, override: str, limit: str) -> None:
    code, _, told = lmlong("train", "mine.yaml", "--out", "never", override)
    assert code == 2 and told.startswith(f"error: {override}: expected a ") and f"at most {limit}" in told, told


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.width=131072", "model.layers=100"], "most of it for the model"),
        (["training.batch_size=1000000", "model.width=10240"], "most of it for a batch"),
    ],
)
def test_too_large_model_is_refused(lmlong: Command, overrides: list[str], words: str) -> None:
    code, _, told = lmlong("train", "mine.yaml", "--out", "never", *overrides)
    assert code == 2 and told.startswith("error: model: training takes at least ") and words in told, told


@pytest.mark.parametrize(
    ("kind", "optimizer", "numbers"),
    [("linear", "adamw", 4), ("window", "muon", 3)],
)
def test_estimate_knows_the_size_of_the_model(place: Path, kind: str, optimizer: str, numbers: int) -> None:
    from lmlong.attention.base import state_tensors
    from lmlong.model.base import count_parameters
    from lmlong.model.build import build, least_bytes
    from lmlong.recipe import file

    options = ["model.layers=3", f"model.attention.kind={kind}", f"training.optimizer={optimizer}"]
    recipe = file.load(str(place / "mine.yaml"), options)
    model = build(recipe, 258)
    state = sum(tensor.nbytes for tensor in state_tensors(model.init_state(2)))
    blocks = 2 * 16 * (8 + 3 * 2 * 16)  # tokens, and the input of each block in bfloat16
    assert least_bytes(recipe, 258) == (4 * numbers * count_parameters(model), blocks + state)


def test_lack_of_memory_exits_with_1(lmlong: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr("lmlong.cli.recipe.load_recipe", lambda name, overrides: torch.empty(1 << 60))
    code, _, told = lmlong("recipe", "check", "quickstart")
    assert code == 1 and told.startswith("error: out of memory: 4611686018427387904 bytes could not be allocated. "), (
        told
    )


def test_text_of_newlines_trains_no_tokenizer(lmlong: Command, place: Path) -> None:
    (place / "newlines.txt").write_text("\n" * 5000)
    words = ("mine.yaml", "text.sources.0.paths=[newlines.txt]")
    kind = ("text.tokenizer.kind=sentencepiece", "text.tokenizer.vocabulary=300")
    code, _, told = lmlong("data", "info", *words, *kind)
    assert code == 2 and told.startswith("error: text.tokenizer: sentencepiece cannot train on this text"), told
    assert lmlong("data", "info", *words)[0] == 0


def test_moved_run_folder_ends_training(
    place: Path, lmlong: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from lmlong.training.callbacks import TrainingCallback

    begun = TrainingCallback.on_train_start

    def moved(self: TrainingCallback, *arguments: object) -> None:
        begun(self, *arguments)  # type: ignore[arg-type]
        (place / "moving").rename(tmp_path / "elsewhere")

    monkeypatch.setattr(TrainingCallback, "on_train_start", moved)
    code, _, told = lmlong("train", "mine.yaml", "--out", "moving")
    assert code == 1 and "error: moving: the run folder was moved or removed while it trained. Resume" in told, told
    assert not (place / "moving").exists()


@pytest.mark.parametrize(
    "words",
    [
        ("state", "info", "pipe"),
        ("state", "build", "run", "book.txt", "-o", "new.state", "--load-state", "pipe"),
        ("generate", "run", "--load-state", "pipe"),
        ("score", "run", "book.txt", "--load-state", "pipe"),
        ("export", "run", "--to", "hf", "--out", "exported", "--evaluation", "pipe"),
        ("data", "tokenizer-info", "pipe"),
        ("import", "pipe", "--out", "imported"),
        ("check", "--plugin", "pipe.py"),
    ],
)
def test_pipe_in_place_of_a_file_is_refused(lmlong: Command, place: Path, words: tuple[str, ...]) -> None:
    """A reader would wait for its end."""
    for name in ("pipe", "pipe.py"):
        if not (place / name).exists():
            os.mkfifo(place / name)
    code, output, error = lmlong(*words)
    assert (code, output) == (2, "")
    assert re.match(r"error: pipe(\.py)?: cannot be read[ (:]*a pipe or a device, not a file", error)


def test_huge_length_is_refused(lmlong: Command) -> None:
    for words in (("--lengths", "16,9999999g"), ("--tokens", "99999999999999999999999")):
        code, _, error = lmlong("eval", "run", *words)
        assert code == 2 and "is more than 1024g tokens, which no text has" in error
