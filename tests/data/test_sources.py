"""Mistakes in a text are reported before slow imports."""

import gzip
import subprocess
import sys
from pathlib import Path

import pytest

from lmlong import recipe
from lmlong.data import sources
from lmlong.data.sources import check_quickly
from lmlong.errors import UsageError

from .made_documents import docx


def look(path: Path, **options: object) -> None:
    source = {"kind": "files", "paths": [str(path)], **options}
    check_quickly(recipe.Text.model_validate({"sources": [source]}))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("latin.txt", b"caf\xe9 " * 20, "byte 3 is not UTF-8"),
        ("latin.txt.gz", gzip.compress(b"caf\xe9 " * 20, mtime=0), "byte 3 is not UTF-8"),
        ("rows.jsonl", b'{"txt": "a"}\n', "no column 'text', only txt. Set column. Did you mean 'txt'?"),
        ("rows.jsonl.gz", gzip.compress(b'{"txt": "a"}\n', mtime=0), "no column 'text', only txt"),
        ("rows.parquet", None, "no column 'text', only txt"),
    ],
)
def test_a_wrong_encoding_or_column_is_reported(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    import pyarrow
    from pyarrow.parquet import write_table

    if content is None:
        write_table(pyarrow.table({"txt": ["a"]}), tmp_path / name)
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError) as caught:
        look(tmp_path / name)
    assert str(caught.value).startswith(f"{tmp_path / name}:") and message in str(caught.value)


WITHOUT_TEXT_AT_FIRST = b'{"title": "a"}\n{"title": "b", "text": "a"}\n'


@pytest.mark.parametrize("content", [b"", b"not json", b"[1]", b"[" * 100_000, b'{"text": "a"}', WITHOUT_TEXT_AT_FIRST])
def test_what_a_first_look_cannot_tell_is_left_to_the_reader(tmp_path: Path, content: bytes) -> None:
    for name in ("rows.jsonl", "rows.parquet"):
        (tmp_path / name).write_bytes(content)
        look(tmp_path / name)


def test_it_takes_no_longer_than_it_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "QUICK_SECONDS", -1.0)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    look(tmp_path / "latin.txt")


def test_mistakes_are_reported_before_torch_is_imported(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("text: {sources: [{kind: files, paths: [nowhere.txt]}]}\ntraining: {steps: 1}\n")
    (tmp_path / "runs" / "old").mkdir(parents=True)
    (tmp_path / "runs" / "old" / "note").write_text("")
    commands = {
        ("train", str(file)): "nowhere.txt: no such file",
        ("train", str(file), "--out", "runs/old"): "runs/old: exists.",
        ("train", str(file), "--resume", "no-run"): "no-run: no such run",
        ("train", str(file), "training.init_from=no-run"): "no-run: no such run",
        ("generate", "no-run"): "no-run: no such run",
        ("eval", "no-run"): "no-run: no such run",
        ("state", "build", "runs/old", "a.txt", "-o", "b"): "runs/old: holds no checkpoint.",
    }
    code = f"""
import contextlib, io, sys
from lmlong.cli.main import main
for words in {list(commands)!r}:
    sys.argv = ["lmlong", *words]
    with contextlib.suppress(SystemExit):
        main()
    print(f"end {{'torch' in sys.modules}}", file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    outputs = done.stderr.split("end False\n")
    assert len(outputs) == len(commands) + 1, done.stderr
    for message, line in zip(commands.values(), outputs, strict=False):
        assert message in line


def test_a_document_is_not_decoded_as_plain_text_by_the_quick_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes are not UTF-8, so the whole text was opened and fingerprinted once more for each such file."""
    (tmp_path / "a.docx").write_bytes(docx())
    monkeypatch.setattr(sources, "open_sources", lambda text: pytest.fail("opened the text"))
    look(tmp_path / "a.docx")
