"""Bad input to `lmlong train`: one message with mistake and remedy, the right code, nothing half-written."""

from pathlib import Path

import pytest
from commands import lmlong

from lmlong.training import plan, profile

TINY = ["text.tokenizer.kind=bytes", "text.sequence_length=16", "model.width=16", "model.layers=1", "model.heads=2"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LMLONG_CACHE", str(tmp_path / "cache"))
    (tmp_path / "book.txt").write_text("once upon a time there was a book. " * 40)
    (tmp_path / "mine.yaml").write_text("text: {sources: [{kind: files, paths: [book.txt]}]}\ntraining: {steps: 2}\n")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["model.widht=8"], 2, "model.widht=8: unknown key. Did you mean 'width'?"),
        (["training.steps=soon"], 2, "training.steps=soon: expected a whole number"),
        (
            ["model.attention.kind=linaer"],
            2,
            "'linaer' is not one of linear, delta, window, softmax, ngram, full, linformer, efficient. Did you mean",
        ),
        (
            ["model.attention.kind=linformer"],
            2,
            "so it cannot be causal (docs/reference/why-linformer-is-not-causal.md). Use linear",
        ),
        (["model.heads=3"], 2, "3 heads do not divide a width of 16."),
        (["text.sources.0.paths=[missing.txt]"], 2, "missing.txt: no such file or folder"),
        (["text.sources.0.paths=[empty.txt]"], 2, "empty.txt: empty"),
        (["text.sources.0.paths=[latin.txt]"], 2, "latin.txt: byte 3 is not UTF-8"),
        (["text.sequence_length=100000"], 2, "one sequence needs 100,001"),
        (["--resume", "nowhere"], 4, "nowhere: no such run or checkpoint."),
        (["training.init_from=nowhere"], 4, "nowhere: no such run or checkpoint."),
        (["training.learning_rate=1e30", "training.steps=5"], 3, "step 2: the norm of the gradient is"),
    ],
)
def test_a_mistake_is_one_message(folder: Path, arguments: list[str], code: int, message: str) -> None:
    (folder / "empty.txt").write_bytes(b"")
    (folder / "latin.txt").write_bytes(b"caf\xe9 " * 200)
    result = lmlong("train", "mine.yaml", *TINY, *arguments)
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert result.returncode == code
    assert result.stdout == ""
    if code == 2:
        assert not (folder / "runs").exists()


def test_an_unknown_recipe_names_the_nearest(folder: Path) -> None:
    result = lmlong("train", "quikstart")
    assert (result.returncode, result.stdout) == (2, "")
    assert "quikstart: no recipe of that name. Did you mean 'quickstart'?" in result.stderr


def test_a_gpu_that_is_not_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # hidden, where there is one
    result = lmlong("train", "mine.yaml", *TINY, "--device", "cuda")
    assert result.returncode == 2
    assert "device: cuda was asked for, but torch finds no GPU here. Use auto or cpu." in result.stderr


def test_a_foreign_tokenizer_in_a_checkpoint_is_refused(folder: Path) -> None:
    assert lmlong("train", "mine.yaml", *TINY).returncode == 0
    checkpoint = (folder / "runs" / "mine" / "checkpoints" / "latest").resolve()
    (checkpoint / "tokenizer.model").write_bytes(b"another tokenizer")
    for command in (["generate", "mine", "--prompt", "a"], ["eval", "mine"]):
        result = lmlong(*command)
        assert result.returncode == 4
        assert "tokenizer.model: not what was saved" in result.stderr


def test_the_end_of_a_run_names_the_commands_to_try_next(folder: Path) -> None:
    result = lmlong("train", "mine.yaml", *TINY)
    assert result.returncode == 0
    assert "lmlong generate runs/mine\n" in result.stdout
    assert "lmlong eval runs/mine\n" in result.stdout
    assert "gzip -9" in result.stdout and "bits per byte" in result.stdout


def test_the_end_of_a_run_shows_a_sample_that_leaves_the_terminal_alone(folder: Path) -> None:
    result = lmlong("train", "mine.yaml", *TINY)
    _, _, rest = result.stdout.partition("\nsample:\n")
    sample, _, _ = rest.partition("\n\nnext:\n")
    assert len(sample) > 20 and all(line.startswith("  ") for line in sample.splitlines() if line)
    assert all(character.isprintable() or character in "\n\t" for character in sample)
    again = lmlong("train", "mine.yaml", *TINY, "--resume", "auto")  # nothing was trained
    assert "sample:" not in again.stdout


def test_a_dry_run_leaves_nothing_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # in this process: what is predicted is tested in training/test_plan.py, and tests/test_readme.py starts processes
    monkeypatch.setattr(plan, "profile_step", lambda recipe, shape, exact: profile._profile(recipe, shape, 1))
    result = lmlong("train", "mine.yaml", *TINY, "--dry-run")
    assert result.returncode == 0 and "sample:" not in result.stdout
    assert "steps        2 of 128 tokens: 256 tokens in all" in result.stdout
    assert not (folder / "runs").exists()
