"""Token files are the same to the bit by one process, by several, and after any number of kills."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path

import pytest
from tokenizers import Tokenizer as HuggingFace
from tokenizers import models, pre_tokenizers, trainers

from lmlong import recipe
from lmlong.data import token_file_writer
from lmlong.data.duplicates import divided
from lmlong.data.sources import open_sources
from lmlong.data.split import Part
from lmlong.data.token_dataset import TokenDataset, prepare
from lmlong.data.tokenizers import train_tokenizer
from lmlong.data.tokenizers.base import ByteTokenizer, Tokenizer
from lmlong.errors import LmlongError

from .conftest import sentences
from .small_batches import content, small_batches, start_preparing

TextOf = Callable[..., recipe.Text]


def corpus(folder: Path) -> None:
    """Many small documents, some of them empty or of records, and large ones, with and without lines, and with bytes
    that are no text."""
    big = "".join(sentences(60))
    folder.mkdir()
    (folder / "a-big.txt").write_text(big)
    (folder / "b-line.txt").write_text(big[:70_000].replace("\n", "\0"))
    (folder / "c-bad.txt").write_bytes(b"\xff".join(big[:40_000].encode().split(b"d")))
    (folder / "d-empty.txt").touch()
    (folder / "e.jsonl").write_text('{"text": "one"}\n{"text": null}\n{"text": ""}\n' * 4 + '{"text": "\u2581 two"}\n')


def byte_level(path: Path) -> str:
    """Train a tokenizer of another library, and return its file."""
    made = HuggingFace(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    made.train_from_iterator(sentences(20), trainer)
    made.save(str(path / "tokenizer.json"))
    return str(path / "tokenizer.json")


@pytest.fixture(
    params=["bytes", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("bpe", "unigram")), "huggingface"]
)
def text(request: pytest.FixtureRequest, text_of: TextOf, tmp_path: Path) -> recipe.Text:
    options: dict[str, object] = {"kind": request.param}
    if request.param == "huggingface":
        options["path"] = byte_level(tmp_path)
    elif request.param != "bytes":
        made = train_tokenizer(sentences(20), recipe.Tokenizer(vocabulary=400, algorithm=request.param))
        made.save(tmp_path / "trained.model")
        options = {"kind": "sentencepiece", "path": str(tmp_path / "trained.model")}
    corpus(tmp_path / "documents")
    return text_of(sentences(30), tokenizer=options, errors="replace", validation={"fraction": 0.3})


def made_by(text: recipe.Text, processes: int, cache: Path, monkeypatch: pytest.MonkeyPatch) -> TokenDataset:
    """Make the token files with this number of processes, in a cache of their own."""
    monkeypatch.setenv("LMLONG_CACHE", str(cache))
    with small_batches():
        return prepare(text, processes=processes)


def test_any_number_of_processes_makes_the_tokens_of_each_document(
    text: recipe.Text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = made_by(text, 2, tmp_path / "two", monkeypatch)
    expected: dict[str, list[int]] = {"train": [], "validation": []}
    starts: dict[str, list[int]] = {"train": [], "validation": []}
    for part in chain.from_iterable(divided(open_sources(text), "keep")):
        if isinstance(part, Part):
            starts[part.split].append(len(expected[part.split]))
            tokenizer = found.tokenizer
            expected[part.split] += [tokenizer.bos, *tokenizer.encode("".join(part.pieces())), tokenizer.eos]
    for split, file in (("train", found.train[0]), ("validation", found.validation)):
        assert file.tokens.tolist() == expected[split] and file.starts.tolist() == starts[split]
    skipped = found.info["sources"][0]["skipped"]
    assert {reason: count["documents"] for reason, count in skipped.items()} == {"no text": 4, "empty": 5}
    assert content(made_by(text, 1, tmp_path / "one", monkeypatch).folder) == content(found.folder)
    monkeypatch.setenv("LMLONG_CACHE", str(tmp_path / "usual"))
    assert content(prepare(text).folder) == content(found.folder), "by batches of the usual size"


@pytest.fixture
def subword_text(text_of: TextOf, tmp_path: Path, subwords: Tokenizer) -> TextOf:
    """The text of documents, with a tokenizer that is trained already."""
    subwords.save(tmp_path / "subwords.model")
    tokenizer = {"kind": "sentencepiece", "path": str(tmp_path / "subwords.model")}
    return partial(text_of, tokenizer=tokenizer)


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_and_resumed_it_makes_the_same_files(
    subword_text: TextOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: int
) -> None:
    """Programs, for what is killed."""
    text = subword_text(sentences(200 + 40 * kills), validation={"fraction": 0.3})
    whole = content(made_by(text, 1, tmp_path / "whole", monkeypatch).folder)
    cache, done = tmp_path / "killed", [0]
    for number in range(kills):
        child = start_preparing(text, cache, processes=1 + number % 2)
        while child.poll() is None and written(cache) <= done[-1]:
            time.sleep(0.002)
        child.kill()
        child.communicate()
        done.append(written(cache))
    assert done == sorted(set(done)), "each resumes where the one before was killed"
    folder = made_by(text, 1, cache, monkeypatch).folder
    assert content(folder) == whole
    assert [path.name for path in (cache / "tokens").iterdir()] == [folder.name]


def written(cache: Path) -> int:
    """The batches that are in unfinished token files."""
    for path in cache.glob("tokens/unfinished-*/progress.json"):
        return int(json.loads(path.read_bytes())["batches"])
    return 0


def cut_off(text: recipe.Text, cache: Path, monkeypatch: pytest.MonkeyPatch, after: int) -> Path:
    """Make token files until this number of batches is written; return the unfinished folder."""
    real = token_file_writer.TokenFileWriter.write

    def write(self: token_file_writer.TokenFileWriter, encoded: dict) -> None:
        if self.batches == after:
            raise KeyboardInterrupt
        real(self, encoded)

    with monkeypatch.context() as patch:
        patch.setattr(token_file_writer.TokenFileWriter, "write", write)
        with pytest.raises(KeyboardInterrupt):
            made_by(text, 1, cache, monkeypatch)
    (left,) = (cache / "tokens").glob("unfinished-*")
    return left


def test_what_is_written_is_not_encoded_again(text_of: TextOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = text_of(sentences(60), validation={"fraction": 0.3})
    whole = made_by(text, 1, tmp_path / "whole", monkeypatch)
    cut_off(text, tmp_path / "cut", monkeypatch, after=7)
    encoded: list[str] = []
    real = ByteTokenizer.encode_parts
    monkeypatch.setattr(ByteTokenizer, "encode_parts", lambda self, texts: encoded.extend(texts) or real(self, texts))
    found = made_by(text, 1, tmp_path / "cut", monkeypatch)
    assert content(found.folder) == content(whole.folder)
    size = sum(count["bytes"] for split, count in found.info["sources"][0].items() if split in ("train", "validation"))
    assert 0 < sum(len(part.encode()) for part in encoded) < size - 6 * (1 << 12)


@pytest.mark.parametrize("damage", ["progress.json", "train-0.tokens", "train-0.starts"])
def test_damaged_progress_is_started_again(
    text_of: TextOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    text = text_of(sentences(60), validation={"fraction": 0.3})
    whole = content(made_by(text, 1, tmp_path / "whole", monkeypatch).folder)
    left = cut_off(text, tmp_path / "cut", monkeypatch, after=7)
    data = bytearray((left / damage).read_bytes())
    data[20] ^= 1
    (left / damage).write_bytes(data)
    assert content(made_by(text, 1, tmp_path / "cut", monkeypatch).folder) == whole


def children(pid: int) -> list[int]:
    """The processes that one has started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def working(subword_text: TextOf, tmp_path: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """A program that makes token files of a long text, and the two processes that encode for it."""
    child = start_preparing(subword_text(["".join(sentences(200)) * 40]), tmp_path / "cache")
    while len(found := children(child.pid)) < 2 or not list((tmp_path / "cache").glob("tokens/*/progress.json")):
        assert child.poll() is None, child.communicate()
        time.sleep(0.01)
    return child, found


Working = tuple[subprocess.Popen[str], list[int]]


def test_a_killed_process_is_reported(working: Working) -> None:
    child, (first, second) = working
    os.kill(first, signal.SIGKILL)
    _, err = child.communicate(timeout=30)
    assert child.returncode == 1
    assert "was ended by signal 9 (SIGKILL), often because the system is out of memory. Run the same command" in err
    assert not alive(second)


@pytest.mark.parametrize(
    "number, code", [pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow), (signal.SIGKILL, -9)]
)
def test_no_process_outlives_the_one_that_started_it(working: Working, number: int, code: int) -> None:
    child, workers = working
    os.kill(child.pid, number)
    _, err = child.communicate(timeout=30)
    assert child.returncode == code and "Traceback" not in err, err
    while any(map(alive, workers)):
        time.sleep(0.01)


@pytest.mark.slow
def test_a_waiting_process_resumes_where_the_first_was_killed(subword_text: TextOf, tmp_path: Path) -> None:
    text = subword_text(["".join(sentences(200)) * 10])
    cache = tmp_path / "cache"
    first = start_preparing(text, cache)
    while not list(cache.glob("tokens/*/progress.json")):
        assert first.poll() is None, first.communicate()
        time.sleep(0.01)
    second = start_preparing(text, cache)
    assert second.stderr and "waiting for" in second.stderr.readline()
    first.kill()
    first.communicate()
    out, err = second.communicate(timeout=100)
    assert second.returncode == 0, err
    assert [path.name for path in (cache / "tokens").iterdir()] == [Path(out.strip()).name]


def test_an_error_in_a_process_is_reported(text_of: TextOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of the tokenizer is missing when the processes read it."""
    text = text_of(["".join(sentences(60))])
    monkeypatch.setattr("lmlong.data.tokenizers.base.Tokenizer.save", lambda self, path: None)
    with pytest.raises(LmlongError, match="a tokenizing process ended with exit code 1"):
        made_by(text, 2, tmp_path / "cache", monkeypatch)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no affinity")
def test_no_more_processes_than_this_one_may_use_cores() -> None:
    code = "import os; os.sched_setaffinity(0, {0}); from lmlong.data.token_encoding import cores; print(cores())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "1\n"
