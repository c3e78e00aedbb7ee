"""Token files hold the documents, once, complete or not at all, in memory that does not grow with the text. Those whose
digests are right and whose numbers are not are reported and written again; none is read."""

import gzip
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmlong import recipe
from lmlong.data import token_encoding
from lmlong.data.token_dataset import FORMAT, prepare
from lmlong.data.token_file_writer import TokenFileWriter
from lmlong.data.tokenizers import training
from lmlong.data.tokenizers.base import Tokenizer
from lmlong.errors import UsageError
from lmlong.io.cache import cache_folder
from lmlong.io.files import with_checksum
from lmlong.io.folder_manifest import NAME, Format, seal

from .conftest import TextOf, documents, sentences, text_over
from .small_batches import content


def test_several_sources_and_validation_of_its_own(tmp_path: Path) -> None:
    names, weights = ("one", "two", "held"), (1.0, 3.0, 1.0)
    sources = []
    for name, weight in zip(names, weights, strict=True):
        (tmp_path / f"{name}.txt").write_text(f"the text of {name} " * 10)
        sources.append({"kind": "files", "paths": [str(tmp_path / f"{name}.txt")], "weight": weight})
    found = prepare(text_over(sources=sources[:2], validation={"sources": sources[2:]}))
    for name, file in zip(names, (*found.train, found.validation), strict=True):
        assert documents(file, found.tokenizer) == [f"the text of {name} " * 10]
    assert found.weights == [1.0, 3.0]
    splits = [set(source) & {"train", "validation"} for source in found.info["sources"]]
    assert splits == [{"train", "validation"}, {"train", "validation"}, {"validation"}]


def test_the_tokenizer_sees_no_validation_text(text_of: TextOf) -> None:
    options = {"tokenizer": {"vocabulary": 300}, "validation": {"fraction": 0.5}}
    before = prepare(text_of(["known " * 100 + "secret" * 100], **options))
    after = prepare(text_of(["known " * 100 + "poison" * 100], **options))
    assert before.folder != after.folder
    assert before.tokenizer.hash == after.tokenizer.hash


def test_the_same_content_is_made_once_whatever_the_names_of_its_files(text_of: TextOf, cache: Path) -> None:
    texts = sentences(30)
    text = text_of(texts)
    first = prepare(text)
    made = (first.folder / "train-0.tokens").stat().st_mtime_ns
    again = prepare(text_of(texts, sequence_length=32))
    assert (again.folder, (again.folder / "train-0.tokens").stat().st_mtime_ns) == (first.folder, made)
    assert [path for path in (cache / "tokens").iterdir() if path.suffix != ".lock"] == [first.folder]
    assert prepare(text_of([*texts[:-1], "other"])).folder != first.folder
    assert prepare(text_of(texts, validation={"fraction": 0.3})).folder != first.folder
    for path in Path(text.sources[0].paths[0]).iterdir():  # type: ignore[union-attr]
        path.rename(path.with_name(f"a-{path.name}"))
    assert prepare(text).folder == first.folder


def test_a_given_tokenizer_replaces_the_one_of_the_recipe(text_of: TextOf, subwords: Tokenizer, tmp_path: Path) -> None:
    """A run that is resumed or evaluated names its own tokenizer, and must not tokenize its corpus again."""
    usual, given = prepare(text_of(sentences(30))), prepare(text_of(sentences(30)), tokenizer=subwords)
    assert given.tokenizer.hash == subwords.hash and given.folder != usual.folder
    subwords.save(tmp_path / "own.model")
    text = text_of(sentences(30), tokenizer={"kind": "sentencepiece", "path": str(tmp_path / "own.model")})
    assert prepare(text).folder == given.folder


def test_too_little_text_is_refused(text_of: TextOf) -> None:
    few = r"the training text has 97 tokens, but one sequence needs 2,049\. Add text or lower"
    with pytest.raises(UsageError, match=few):
        prepare(text_of(["x" * 100], sequence_length=2048))
    with pytest.raises(UsageError, match=r"of 25 documents, text.validation.fraction=1e-09 holds out none"):
        prepare(text_of(sentences(25), validation={"fraction": 1e-9}))


def test_tokens_are_mapped_numbers_of_two_bytes_and_may_be_cut(text_of: TextOf) -> None:
    found = prepare(text_of(sentences(30)))
    file = found.train[0]
    assert isinstance(file.tokens, np.memmap)
    assert np.array_equal(file.tokens, np.fromfile(found.folder / "train-0.tokens", dtype="<u2"))
    assert len(file.tokens) == found.info["sources"][0]["train"]["tokens"]
    size, starts = file.starts[1] + 1, file.starts.tolist()
    assert file.first(size).starts.tolist() == starts[:2] and len(file.first(size).tokens) == size
    assert file.first(None).starts.tolist() == starts


PEAK = """
import resource, sys
from lmlong import recipe
from lmlong.data.token_dataset import prepare
source = recipe.Files(kind="files", paths=[sys.argv[1]])
prepare(recipe.Text(sources=[source], tokenizer=recipe.Tokenizer(kind="bytes")), processes=2)
print(max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".txt", ".txt.gz"])
def test_memory_does_not_grow_with_a_file(tmp_path: Path, suffix: str) -> None:
    def peak(megabytes: int) -> int:
        path = tmp_path / f"{megabytes}{suffix}"
        with gzip.open(path, "wb", 1) if suffix.endswith("gz") else path.open("wb") as file:
            for _ in range(megabytes):
                file.write(b"0123456789abcde\n" * 62_500)
        done = subprocess.run([sys.executable, "-c", PEAK, path], capture_output=True, text=True, check=True)
        return int(done.stdout) // 1024

    assert peak(32) - peak(1) < 12


Change = Callable[[bytes], bytes]


def numbers(dtype: str, change: Callable[[np.ndarray], np.ndarray]) -> Change:
    return lambda data: change(np.frombuffer(data, dtype)).astype(dtype).tobytes()


def info(change: Callable[[Any], object]) -> Change:
    def changed(data: bytes) -> bytes:
        content = json.loads(data)
        change(content)
        return json.dumps(content).encode()

    return changed


DAMAGES = [
    ("train-0.tokens", numbers("<u2", lambda a: np.where(np.arange(len(a)) == 5, 60_000, a)), "beyond the vocabulary"),
    ("validation.tokens", numbers("<u2", lambda a: a + 300), "beyond the vocabulary"),
    ("train-0.tokens", lambda data: data[:-1], "not a multiple of a number"),
    ("train-0.starts", lambda data: data[:-1], "not a multiple of a number"),
    ("train-0.starts", numbers("<i8", lambda a: a - 1), "do not increase from 0"),
    ("train-0.starts", numbers("<i8", lambda a: a[::-1]), "do not increase from 0"),
    ("train-0.starts", numbers("<i8", lambda a: a * 0), "do not increase from 0"),
    ("train-0.starts", numbers("<i8", lambda a: np.where(a == a[-1], 1 << 62, a)), "are out of range"),
    ("train-0.starts", lambda data: b"", "are out of range"),
    ("train-0.tokens", numbers("<u2", lambda a: a[: len(a) // 3]), "are out of range"),
    ("info.json", info(lambda found: found.pop("overlap")), ""),
    ("info.json", info(lambda found: found["sources"][0].update(encodings="latin-1")), ""),
    ("info.json", info(lambda found: found["sources"].pop()), ""),
    ("info.json", info(lambda found: found["sources"][0]["train"].update(tokens="7")), ""),
]


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory) -> tuple[recipe.Text, Path]:
    """A text of three documents and one to validate on, and a cache of its tokens."""
    folder = tmp_path_factory.mktemp("text")
    for number in range(3):
        (folder / f"{number}.txt").write_text(f"document {number} " * 20)
    (folder / "held-out.md").write_text("another one " * 20)
    validation = {"sources": [{"kind": "files", "paths": [str(folder / "*.md")]}]}
    return text_over(folder / "*.txt", validation=validation), folder / "cache"


@pytest.mark.parametrize(("name", "change", "complaint"), DAMAGES)
def test_a_folder_that_cannot_be_is_reported_and_written_again(
    cached: tuple[recipe.Text, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    change: Change,
    complaint: str,
) -> None:
    text, cache = cached
    monkeypatch.setenv("LMLONG_CACHE", str(cache))
    folder = prepare(text).folder
    whole = content(folder)
    (folder / name).write_bytes(change(whole[name]))
    sign(folder, FORMAT)
    prepare(text)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "damaged" in line]
    assert re.search(rf"\.(tokens|json): damaged.*{complaint}.* Rebuilding it\.$", line)
    assert content(folder) == whole


def sign(folder: Path, version: Format) -> None:
    (folder / NAME).unlink()
    seal(folder, version, {})


def test_an_unreadable_tokenizer_is_trained_again(
    cached: tuple[recipe.Text, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    trained = cached[0].model_copy(update={"tokenizer": recipe.Tokenizer(vocabulary=300)})
    tokenizer = prepare(trained).tokenizer
    (folder,) = (cache_folder() / "tokenizers").iterdir()
    (folder / "tokenizer.model").write_bytes(b"noise")
    sign(folder, training.FORMAT)
    assert prepare(trained).tokenizer.hash == tokenizer.hash
    assert capsys.readouterr().err.count("Rebuilding it.") == 1


IMPOSSIBLE = [{"batches": -1}, {"batches": "3"}, {"batches": 1.5}, {"size": 1 << 40}, {"size": -4}]


@pytest.mark.parametrize("change", IMPOSSIBLE)
def test_progress_that_cannot_be_is_begun_again(tmp_path: Path, change: dict[str, object]) -> None:
    files = TokenFileWriter(tmp_path, {"train-0.tokens"})
    files.save()
    files.close()
    said = json.loads((tmp_path / "progress.json").read_text())
    del said["sha256"]
    name, (size, digest) = next(iter(said["files"].items()))
    said["files"][name] = [change.get("size", size), digest]
    said["batches"] = change.get("batches", 7)
    assert said["characters"] == token_encoding.BATCH
    (tmp_path / "progress.json").write_text(with_checksum(said))
    again = TokenFileWriter(tmp_path, {"train-0.tokens"})
    again.close()
    assert (again.batches, again.size) == (0, 0)
