"""Sources find the documents that a recipe names, all of them and each once."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import datasets
import pytest
import zstandard

from lmlong import recipe
from lmlong.data.document import Document, Skipped
from lmlong.data.sources import Source, open_source
from lmlong.errors import UsageError

ROWS = [{"text": "one\r\n\n", "n": 1}, {"text": None, "n": 2}, {"text": "", "n": 3}, {"text": "中\u2028", "n": 4}]


def files(*paths: object, **options: Any) -> Source:
    return open_source(recipe.Files(kind="files", paths=[str(path) for path in paths], **options), "strict")


def texts(source: Source) -> list[str]:
    return ["".join(entry.pieces()) for entry in source.documents() if isinstance(entry, Document)]


def skipped(source: Source) -> list[str]:
    return [entry.reason for entry in source.documents() if isinstance(entry, Skipped)]


def tree(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def test_standard_library() -> None:
    source = open_source(recipe.PythonStdlib(kind="python-stdlib"), "strict")
    names = [entry.name for entry in source.documents()]
    assert {"os.py", "json/decoder.py"} <= set(names)
    assert names == sorted(names)
    assert not [name for name in names if "/test/" in f"/{name}" or "site-packages" in name]
    assert not [name for name in names if name.startswith("encodings/")]  # tables that are near-copies of each other
    with open(os.__file__, encoding="utf-8", newline="") as file:
        assert file.read() in texts(source)


def test_folders_globs_and_files_sorted_and_never_twice(tmp_path: Path) -> None:
    tree(tmp_path, "b.txt", "a/c.md", "a/d/e.py", "a/x.bin", ".hidden/h.txt", "odd.name")
    assert texts(files(tmp_path)) == ["a/c.md", "a/d/e.py", "b.txt"]
    assert texts(files(tmp_path / "**" / "*.[mp]*", tmp_path / "a")) == ["a/c.md", "a/d/e.py"]
    assert texts(files(tmp_path / "odd.name", tmp_path / "b.txt", tmp_path)) == [
        *("odd.name", "b.txt", "a/c.md", "a/d/e.py")
    ]


def test_a_name_that_looks_like_a_glob_is_a_file(tmp_path: Path) -> None:
    tree(tmp_path, "[a].txt", "a.txt")
    (tmp_path / "[r].jsonl").write_text('{"text": "row"}\n')
    assert texts(files(tmp_path / "[a].txt", tmp_path / "[r].jsonl")) == ["[a].txt", "row"]


@pytest.mark.parametrize("name", ["missing.txt", "none*.txt", "folder"])
def test_paths_without_files_are_errors(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError, match=r"(no such file|contains no supported file).*Correct"):
        files(tmp_path / name)


def test_empty_files(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    with pytest.raises(UsageError, match=r"empty.txt: empty"):
        files(tmp_path / "empty.txt")
    tree(tmp_path, "full.txt")
    assert texts(files(tmp_path)) == ["full.txt"]
    assert skipped(files(tmp_path)) == ["empty"]


LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
RECORDS = {
    **{"a.jsonl": LINES, "A.NDJSON": LINES, "a.json": json.dumps(ROWS).encode()},
    **{"a.jsonl.gz": gzip.compress(LINES), "a.jsonl.zst": zstandard.compress(LINES), "a.parquet": None},
}


@pytest.mark.parametrize("name", RECORDS)
def test_records(tmp_path: Path, name: str) -> None:
    path, data = tmp_path / name, RECORDS[name]
    if data is None:
        datasets.Dataset.from_list(ROWS).to_parquet(path)
    else:
        path.write_bytes(data)
    source = files(path)
    assert texts(source) == ["one\r\n\n", "", "中\u2028"]
    assert skipped(source) == ["no text"]
    assert [entry.name for entry in source.documents()][3] == f"{path}:3"


@pytest.mark.parametrize(("name", "separator"), [("a.csv", ","), ("a.tsv", "\t")])
def test_tables_that_are_named_are_records(tmp_path: Path, name: str, separator: str) -> None:
    rows = (("id", "text"), ("1", "one"), ("2", "two"))
    (tmp_path / name).write_text("".join(separator.join(row) + "\n" for row in rows))
    assert texts(files(tmp_path / name)) == ["one", "two"]


@pytest.mark.parametrize(
    ("line", "column", "message"),
    [
        ('{"texts": "x", "n": 1}', "text", "no column 'text', only texts, n.*Did you mean 'texts'"),
        ('{"texts": "x", "n": 1}', "n", "column 'n' holds int"),
        ('{"text": "x"', "text", "`datasets` cannot read it"),
    ],
)
def test_damaged_records_and_wrong_columns_are_errors(tmp_path: Path, line: str, column: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_text(line + "\n")
    with pytest.raises(UsageError, match=rf"a\.jsonl.*{message}"):
        texts(files(tmp_path / "a.jsonl", column=column))


def hub(folder: Path, split: str = "train", streaming: bool = True) -> Source:
    options = recipe.Hub(kind="hub", dataset=str(folder), split=split, streaming=streaming)
    return open_source(options, "strict")


def test_data_sets_in_local_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    datasets.disable_progress_bars()
    rows, (parquet, saved, splits) = datasets.Dataset.from_list(ROWS), (tmp_path / name for name in ("p", "s", "d"))
    parquet.mkdir()
    rows.to_parquet(parquet / "train.parquet")
    rows.save_to_disk(saved)
    datasets.DatasetDict(train=rows, test=rows.select([0])).save_to_disk(splits)
    for folder in (parquet, saved, splits):
        for streaming in (True, False):
            assert texts(hub(folder, streaming=streaming)) == ["one\r\n\n", "", "中\u2028"]
    for folder, reason in ((parquet, "valid"), (splits, "no split 'valid', only train, test")):
        with pytest.raises(UsageError, match=rf"hub {folder}: .*cannot read it \(.*{reason}"):
            texts(hub(folder, "valid"))
    assert texts(hub(splits, "test")) == ["one\r\n\n"] and texts(files(saved)) == texts(hub(saved))


def test_fingerprint_follows_content_and_nothing_else(tmp_path: Path) -> None:
    tree(tmp_path, "one/a.txt", "two/b.txt")
    (tmp_path / "two/b.txt").write_text("one/a.txt")
    assert files(tmp_path / "one").fingerprint == files(tmp_path / "two").fingerprint
    (tmp_path / "two/b.txt").write_text("one/a.tyt")
    assert files(tmp_path / "one").fingerprint != files(tmp_path / "two").fingerprint
