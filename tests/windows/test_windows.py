"""Training, resuming, generating and evaluating need nothing that Windows lacks, nor native code and DeepSpeed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lmlong.checkpoint import read
from lmlong.recipe import file as recipe_file
from lmlong.training.run import train

pytestmark = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the stand-in asks /proc")

RECIPE = """
text: {sources: [{kind: files, paths: [book.txt]}], tokenizer: {kind: bytes}, sequence_length: 32}
model: {width: 16, layers: 1, heads: 1}
training: {steps: 2, batch_size: 2, precision: "32", checkpoint_every: 1, keep_last: 1, validate_every: 2}
"""


def on_windows(folder: Path, *commands: list[str]) -> subprocess.CompletedProcess[str]:
    program = Path(__file__).with_name("like_windows.py")
    environment = {**os.environ, "LMLONG_CACHE": str(folder / "cache")}
    command = [sys.executable, str(program), json.dumps(commands)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, encoding="utf-8", timeout=120)


def test_a_run_is_trained_resumed_evaluated_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "book.txt").write_bytes("it was a dark and stormy night — the rain fell\r\n".encode() * 60)
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    run = tmp_path / "runs" / "tiny"
    done = on_windows(
        tmp_path,
        ["train", "tiny.yaml"],
        ["train", "tiny.yaml", "training.steps=4", "--resume", "auto"],
        ["generate", "runs/tiny", "--prompt", "it was", "--max-tokens", "5"],
        ["eval", "runs/tiny", "--by", "context"],
        ["info", "runs/tiny"],
        ["train", "tiny.yaml", "--overwrite", "--out", "runs/tiny"],
    )
    codes = [line for line in done.stdout.splitlines() if line.startswith("exit code")]
    names = ("train", "train", "generate", "eval", "info", "train")
    assert codes == [f"exit code 0 of {name}" for name in names], done.stderr
    assert "torch (is not supported on Windows)" in done.stdout
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000002"]
    assert b"\r" not in (run / "metrics.jsonl").read_bytes()

    monkeypatch.chdir(tmp_path)  # and the run goes on on another system
    monkeypatch.setenv("LMLONG_CACHE", str(tmp_path / "cache"))
    train(recipe_file.load("tiny.yaml", ["training.steps=3"]), run, resume="auto")
    assert read.find(run).name == "step-00000003"


def test_the_stand_in_refuses_what_windows_refuses(tmp_path: Path) -> None:
    code = """
import sys; sys.path.insert(0, sys.argv[1])
import like_windows; like_windows.refuse()
from pathlib import Path
namespace = {"__name__": "lmlong.planted"}
for line in (
    "import fcntl",
    "from os import fork",
    "import os; os.open('.', os.O_RDONLY)",
    "import signal; signal.SIGHUP",
    "from pathlib import Path; Path('link').symlink_to('.')",
    "Path('a').write_text('x'); f = open('a'); Path('a').unlink()",
):
    try:
        exec(line, namespace)
        print("ran:", line)
    except (ImportError, AttributeError, OSError) as error:
        pass
"""
    command = [sys.executable, "-c", code, str(Path(__file__).parent)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, encoding="utf-8", timeout=60)
    assert (done.stdout, done.returncode) == ("", 0), done.stderr
