"""Every file of a folder is read or named with the reason; all mistakes are reported at once."""

from pathlib import Path

import pytest

from lmlong import recipe
from lmlong.data.document import Skipped
from lmlong.data.source_files import find_files
from lmlong.data.text_info import notes
from lmlong.data.token_dataset import prepare
from lmlong.errors import RecipeError, UsageError

from .conftest import text_over
from .test_corpus import files, texts, tree

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
    (folder / "broken").symlink_to("nowhere.txt")
    (folder / "linked").symlink_to(tmp_path)
    return folder


def test_all_of_a_folder_is_read_or_left_out_with_the_reason(folder: Path) -> None:
    source = files(folder)
    assert texts(source) == READ
    reasons = {Path(entry.name).name: entry.reason for entry in source.left_out}
    assert reasons.keys() == LEFT_OUT.keys()
    assert [name for name, reason in LEFT_OUT.items() if not reasons[name].startswith(reason)] == []


def test_a_folder_that_may_not_be_searched_is_named(users_folder: Path) -> None:
    (users_folder / "a.txt").write_text("a.txt")
    (users_folder / "closed").mkdir(mode=0)
    source = files(users_folder)
    assert texts(source) == ["a.txt"]
    assert [(Path(entry.name).name, entry.reason) for entry in source.left_out] == [
        ("closed", "cannot be read (Permission denied)")
    ]


def test_what_is_named_beside_its_folder_is_not_left_out(folder: Path) -> None:
    source = files(folder, folder / "README")
    assert texts(source) == [*READ, "README"]
    assert "README" not in [Path(entry.name).name for entry in source.left_out]


def test_no_text_is_refused_where_it_is_named_and_left_out_of_a_glob(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"a\.mobi: an unsupported e-book format"):
        files(folder / "a.mobi")
    found = find_files([str(folder / "[Aa].[Tm]*")], "text")
    assert [path.name for path in found.files] == ["A.TXT"]
    assert [Path(entry.name).name for entry in found.left_out] == ["a.mobi"]


def test_all_unreadable_files_are_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as missing:
        files(tmp_path / "one.txt", tmp_path / "two.txt")
    assert [name in str(missing.value) for name in ("2 files", "one.txt", "two.txt")] == [True] * 3
    (tmp_path / "good.txt").write_text("good " * 99)
    for name, data in {"a.txt": b"\xff\xfe\xfd", "b.txt.gz": b"no gzip", "c.jsonl": b'{"other": 1}\n'}.items():
        (tmp_path / name).write_bytes(data)
    paths = [tmp_path / part for part in ("a.txt", "[bc].*", "good.txt")]
    with pytest.raises(UsageError) as caught:
        prepare(text_over(*paths, tokenizer={"vocabulary": 300}))
    lines = str(caught.value).splitlines()
    assert lines[0] == "3 files or paths cannot be read:" and len(lines) == 4
    for line, name in zip(lines[1:], ("a.txt", "b.txt.gz", "c.jsonl"), strict=True):
        assert line.startswith(f"{tmp_path / name}")


def test_files_of_another_encoding_are_left_out_of_a_folder_that_has_others(tmp_path: Path) -> None:
    for name in ("a.txt", "below/b.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes("Он сказал".encode("cp1251"))
    for paths in ([tmp_path], [tmp_path / "*.txt", tmp_path / "below"]):
        with pytest.raises(UsageError, match=r"a\.txt: byte 0 is not UTF-8(.|\n)*b\.txt: byte 0 is not UTF-8"):
            texts(files(*paths))  # nothing would be left
    (tmp_path / "good.txt").write_text("good")
    assert texts(files(tmp_path)) == texts(files(tmp_path / "*.txt")) == ["good"]
    reasons = {Path(each.name).name: each.reason for each in files(tmp_path).documents() if isinstance(each, Skipped)}
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


def test_an_encoding_that_there_is_not() -> None:
    with pytest.raises(RecipeError, match="encoding: 'utf-9' is not an encoding that Python supports"):
        recipe.Text(encoding="utf-9")
