"""Sources find the documents that a recipe names, each once; what is not read is named with the reason; and all
mistakes are reported at once, before slow imports."""

import os
import subprocess
import sys
from pathlib import Path

import datasets
import pytest

from lmlong import recipe
from lmlong.data.source_files import find_files
from lmlong.data.sources import Source, open_source
from lmlong.data.text_info import notes
from lmlong.data.token_dataset import prepare
from lmlong.errors import RecipeError, UsageError

from .conftest import files, skipped, text_over, texts, tree


def test_standard_library() -> None:
    source = open_source(recipe.PythonStdlib(kind="python-stdlib"), "strict")
    names = [entry.name for entry in source.documents()]
    assert {"os.py", "json/decoder.py"} <= set(names)
    assert names == sorted(names)
    assert not [name for name in names if "/test/" in f"/{name}" or "site-packages" in name]
    assert not [name for name in names if name.startswith("encodings/")]  # tables that are near-copies of each other
    with open(os.__file__, encoding="utf-8", newline="") as file:
        assert file.read() in texts(source)


def test_folders_globs_and_files_are_sorted_and_never_read_twice(tmp_path: Path) -> None:
    tree(tmp_path, "b.txt", "a/c.md", "a/d/e.py", "a/x.bin", ".hidden/h.txt", "odd.name")
    assert texts(files(tmp_path)) == ["a/c.md", "a/d/e.py", "b.txt"]
    assert texts(files(tmp_path / "**" / "*.[mp]*", tmp_path / "a")) == ["a/c.md", "a/d/e.py"]
    every = [tmp_path / "odd.name", tmp_path / "b.txt", tmp_path]
    assert texts(files(*every)) == ["odd.name", "b.txt", "a/c.md", "a/d/e.py"]
    tree(tmp_path / "new", "[a].txt", "a.txt")
    (tmp_path / "new" / "[r].jsonl").write_text('{"text": "row"}\n')
    assert texts(files(tmp_path / "new" / "[a].txt", tmp_path / "new" / "[r].jsonl")) == ["[a].txt", "row"]


def hub(folder: Path, split: str = "train", streaming: bool = True) -> Source:
    options = recipe.Hub(kind="hub", dataset=str(folder), split=split, streaming=streaming)
    return open_source(options, "strict")


def test_data_sets_in_local_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    datasets.disable_progress_bars()
    rows = datasets.Dataset.from_list([{"text": "one\r\n\n"}, {"text": None}, {"text": "中\u2028"}])
    parquet, saved, splits = (tmp_path / name for name in ("p", "s", "d"))
    parquet.mkdir()
    rows.to_parquet(parquet / "train.parquet")
    rows.save_to_disk(saved)
    datasets.DatasetDict(train=rows, test=rows.select([0])).save_to_disk(splits)
    for folder in (parquet, saved, splits):
        for streaming in (True, False):
            assert texts(hub(folder, streaming=streaming)) == ["one\r\n\n", "中\u2028"]
    for folder, reason in ((parquet, "valid"), (splits, "no split 'valid', only train, test")):
        with pytest.raises(UsageError, match=rf"hub {folder}: .*cannot read it \(.*{reason}"):
            texts(hub(folder, "valid"))
    assert texts(hub(splits, "test")) == ["one\r\n\n"] and texts(files(saved)) == texts(hub(saved))


READ = ["A.TXT", "b.Md", "c.ndjson"]
LEFT_OUT = {
    ".git": "hidden",
    ".hidden": "hidden",
    "a.xml": "markup",
    "a.mobi": "an unsupported e-book",
    "a.prc.7z": "an unsupported archive",
    "a.doc": "an unsupported document",
    "a.html.gz": "a compressed document: unpack it",
    "a.json": "may hold no records: name it to read its column 'text'",
    "a.csv": "may hold no records",
    "README": "unknown format",
    "broken": "a broken link",
    "linked": "a link to a folder",
    "cache-1f.arrow": "a cache of `datasets`",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of files of all kinds."""
    folder = tmp_path / "texts"
    links = ("broken", "linked")
    tree(folder, *READ[:2], ".git/x.txt", *(name for name in LEFT_OUT if name not in (".git", *links)))
    (folder / "c.ndjson").write_text('{"text": "c.ndjson"}\n')
    (folder / "empty.txt").touch()
    (folder / "broken").symlink_to("nowhere.txt")
    (folder / "linked").symlink_to(tmp_path)
    return folder


def test_all_of_a_folder_is_read_or_left_out_with_the_reason(folder: Path) -> None:
    source = files(folder)
    assert texts(source) == READ and skipped(source) == {"empty.txt": "empty"}
    reasons = {Path(entry.name).name: entry.reason for entry in source.left_out}
    assert reasons.keys() == LEFT_OUT.keys()
    assert [name for name, reason in LEFT_OUT.items() if not reasons[name].startswith(reason)] == []
    source = files(folder, folder / "README")
    assert texts(source) == [*READ, "README"]
    assert "README" not in [Path(entry.name).name for entry in source.left_out], "it is named beside its folder"
    with pytest.raises(UsageError, match=r"a\.mobi: an unsupported e-book format"):
        files(folder / "a.mobi")
    found = find_files([str(folder / "[Aa].[Tm]*")], "text")
    assert [path.name for path in found.files] == ["A.TXT"]
    assert [Path(entry.name).name for entry in found.left_out] == ["a.mobi"]


def test_a_folder_that_may_not_be_searched_is_named(users_folder: Path) -> None:
    (users_folder / "a.txt").write_text("a.txt")
    (users_folder / "closed").mkdir(mode=0)
    source = files(users_folder)
    assert texts(source) == ["a.txt"]
    left_out = [(Path(entry.name).name, entry.reason) for entry in source.left_out]
    assert left_out == [("closed", "cannot be read (Permission denied)")]


def test_all_unreadable_files_are_reported_at_once(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    none = {"missing.txt": "no such file", "none*.txt": "contains no supported", "folder": "contains no supported"}
    with pytest.raises(UsageError, match=r"^3 files or paths") as caught:
        files(*(tmp_path / name for name in none))
    for line, (name, message) in zip(str(caught.value).splitlines()[1:], none.items(), strict=True):
        assert line.startswith(f"{tmp_path / name}: {message}") and ". Correct " in line
    (tmp_path / "good.txt").write_text("good " * 99)
    for name, data in {"a.txt": b"\xff\xfe\xfd", "b.txt.gz": b"no gzip", "c.jsonl": b'{"other": 1}\n'}.items():
        (tmp_path / name).write_bytes(data)
    paths = [tmp_path / part for part in ("a.txt", "[bc].*", "good.txt")]
    with pytest.raises(UsageError) as caught:
        prepare(text_over(*paths, tokenizer={"vocabulary": 300}))
    head, *lines = str(caught.value).splitlines()
    assert head == "3 files or paths cannot be read:"
    assert [line.split(":")[0] for line in lines] == [str(tmp_path / name) for name in ("a.txt", "b.txt.gz", "c.jsonl")]


def test_files_of_another_encoding_are_left_out_of_a_folder_that_has_others(tmp_path: Path) -> None:
    for name in ("a.txt", "below/b.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes("Он сказал".encode("cp1251"))
    for paths in ([tmp_path], [tmp_path / "*.txt", tmp_path / "below"]):
        with pytest.raises(UsageError, match=r"a\.txt: byte 0 is not UTF-8(.|\n)*b\.txt: byte 0 is not UTF-8"):
            texts(files(*paths))  # nothing would be left
    (tmp_path / "good.txt").write_text("good")
    assert texts(files(tmp_path)) == texts(files(tmp_path / "*.txt")) == ["good"]
    reasons = skipped(files(tmp_path))
    assert reasons.keys() == {"a.txt", "b.txt"} and "text.encoding" in reasons["a.txt"]
    with pytest.raises(UsageError, match=r"a\.txt: byte 0 is not UTF-8"):
        texts(files(tmp_path, tmp_path / "a.txt"))  # named too


def test_encodings_and_skipped_files_are_reported_for_cached_tokens_too(folder: Path) -> None:
    (folder / "d.txt").write_bytes("sechzehn Bären ".encode("utf-16") * 9)
    for _ in range(2):
        (source,) = prepare(text_over(folder)).info["sources"]
        assert f"read as utf-16: {folder / 'd.txt'}" in list(notes(source))
        assert f"left out, hidden: {folder / '.git'}, {folder / '.hidden'}" in list(notes(source))
        (folder / ".git" / "y.txt").write_text("nothing of it is read")
    (folder / "new.mobi").touch()
    assert any("new.mobi" in line for line in notes(prepare(text_over(folder)).info["sources"][0]))


def test_tokens_of_another_encoding_are_made_again(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(("é" * 9 + "e" * 300).encode("cp1252"))
    found = {name: prepare(text_over(tmp_path / "a.txt", encoding=name)) for name in ("auto", "cp1252", "cp1251")}
    assert found["auto"].identity == found["cp1252"].identity != found["cp1251"].identity
    with pytest.raises(UsageError, match="is not UTF-8"):
        prepare(text_over(tmp_path / "a.txt", encoding="utf-8"))
    with pytest.raises(RecipeError, match="encoding: 'utf-9' is not an encoding that Python supports"):
        recipe.Text(encoding="utf-9")


COMMANDS = {
    ("train", "mine.yaml"): "nowhere.txt: no such file",
    ("train", "mine.yaml", "--out", "runs/old"): "runs/old: exists.",
    ("train", "mine.yaml", "--resume", "no-run"): "no-run: no such run",
    ("train", "mine.yaml", "training.init_from=no-run"): "no-run: no such run",
    ("generate", "no-run"): "no-run: no such run",
    ("eval", "no-run"): "no-run: no such run",
    ("state", "build", "runs/old", "a.txt", "-o", "b"): "runs/old: holds no checkpoint.",
}
CODE = f"""
import contextlib, sys
from lmlong.cli.main import main
for words in {list(COMMANDS)!r}:
    sys.argv = ["lmlong", *words]
    with contextlib.suppress(SystemExit):
        main()
    print(f"end {{'torch' in sys.modules}}", file=sys.stderr)
"""


def test_mistakes_are_reported_before_torch_is_imported(tmp_path: Path) -> None:
    recipe_text = "text: {sources: [{kind: files, paths: [nowhere.txt]}]}\ntraining: {steps: 1}\n"
    (tmp_path / "mine.yaml").write_text(recipe_text)
    (tmp_path / "runs" / "old").mkdir(parents=True)
    (tmp_path / "runs" / "old" / "note").touch()
    done = subprocess.run([sys.executable, "-c", CODE], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    outputs = done.stderr.split("end False\n")
    assert len(outputs) == len(COMMANDS) + 1, done.stderr
    for message, line in zip(COMMANDS.values(), outputs, strict=False):
        assert message in line
