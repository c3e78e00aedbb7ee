"""Token files are the same to the bit by one process, by several, and after any number of kills or a full disk."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path

import pytest
from interop.tiny_llama import byte_level

from lmlong import recipe
from lmlong.data import token_file_writer
from lmlong.data.duplicates import divided
from lmlong.data.sources import open_sources
from lmlong.data.split import Part
from lmlong.data.token_dataset import TokenDataset, prepare
from lmlong.data.token_encoding import cores
from lmlong.data.tokenizers import train_tokenizer
from lmlong.data.tokenizers.base import ByteTokenizer, Tokenizer
from lmlong.errors import LmlongError
from lmlong.report import progress

from .conftest import TextOf, sentences
from .small_batches import content, small_batches, start_preparing


def corpus(folder: Path) -> None:
    """Empty documents, records, and large ones with and without lines and with bytes that are no text."""
    big = "".join(sentences(60))
    folder.mkdir()
    (folder / "a-big.txt").write_text(big)
    (folder / "b-line.txt").write_text(big[:70_000].replace("\n", "\0"))
    (folder / "c-bad.txt").write_bytes(b"\xff".join(big[:40_000].encode().split(b"d")))
    (folder / "d-empty.txt").touch()
    (folder / "e.jsonl").write_text('{"text": "one"}\n{"text": null}\n{"text": ""}\n' * 4 + '{"text": "\u2581 two"}\n')


@pytest.fixture(
    params=["huggingface", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("bytes", "bpe", "unigram"))]
)
def text(request: pytest.FixtureRequest, text_of: TextOf, tmp_path: Path) -> recipe.Text:
    options: dict[str, object] = {"kind": request.param}
    if request.param == "huggingface":
        options["path"] = str(tmp_path / "tokenizer.json")
        byte_level().save(options["path"])
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
    parts = [part for part in chain.from_iterable(divided(open_sources(text), "keep")) if isinstance(part, Part)]
    for split, file in (("train", found.train[0]), ("validation", found.validation)):
        tokens, starts = [], []
        for part in (part for part in parts if part.split == split):
            starts.append(len(tokens))
            encoded = found.tokenizer.encode("".join(part.pieces()))
            tokens += [found.tokenizer.bos, *encoded, found.tokenizer.eos]
        assert file.tokens.tolist() == tokens and file.starts.tolist() == starts
    skipped = found.info["sources"][0]["skipped"]
    assert {reason: count["documents"] for reason, count in skipped.items()} == {"no text": 4, "empty": 5}
    assert content(made_by(text, 1, tmp_path / "one", monkeypatch).folder) == content(found.folder)
    monkeypatch.setenv("LMLONG_CACHE", str(tmp_path / "usual"))
    assert content(prepare(text).folder) == content(found.folder), "by batches of the usual size"


@pytest.fixture
def subword_text(text_of: TextOf, tmp_path: Path, subwords: Tokenizer) -> TextOf:
    """The text of documents, with a tokenizer that is trained already."""
    subwords.save(tmp_path / "subwords.model")
    return partial(text_of, tokenizer={"kind": "sentencepiece", "path": str(tmp_path / "subwords.model")})


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_and_resumed_it_makes_the_same_files(
    subword_text: TextOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: int
) -> None:
    """Programs, for what is killed."""
    text = subword_text(sentences(120 + 40 * kills), validation={"fraction": 0.3})
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


@pytest.mark.parametrize("damage", [None, "progress.json", "train-0.tokens", "train-0.starts"])
def test_what_is_written_is_encoded_again_only_if_it_is_damaged(
    text_of: TextOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str | None
) -> None:
    text = text_of(sentences(60), validation={"fraction": 0.3})
    whole = made_by(text, 1, tmp_path / "whole", monkeypatch)
    left = cut_off(text, tmp_path / "cut", monkeypatch, after=7)
    if damage:
        data = bytearray((left / damage).read_bytes())
        data[20] ^= 1
        (left / damage).write_bytes(data)
    encoded: list[str] = []
    real = ByteTokenizer.encode_parts
    monkeypatch.setattr(ByteTokenizer, "encode_parts", lambda self, texts: encoded.extend(texts) or real(self, texts))
    found = made_by(text, 1, tmp_path / "cut", monkeypatch)
    assert content(found.folder) == content(whole.folder)
    size = sum(found.info["sources"][0][split]["bytes"] for split in ("train", "validation"))
    again = sum(len(part.encode()) for part in encoded)
    assert again == size if damage else 0 < again < size - 6 * (1 << 12)


def test_share_speed_and_time_left_are_shown(
    text_of: TextOf, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "FIRST", 0.0)
    monkeypatch.setattr(progress, "INTERVAL", 0.0)
    with small_batches():
        prepare(text_of(sentences(30), tokenizer={"vocabulary": 300}), processes=1)
    lines = capsys.readouterr().err.splitlines()
    assert any(line.startswith("sample for the tokenizer: ") for line in lines)
    pattern = r"tokens: (\d+)% of [\d.]+ [kM]B, [\d.]+ [kM]B/s, [\d:]+ left"
    shares = [int(match[1]) for match in map(re.compile(pattern).fullmatch, lines) if match]
    assert shares == sorted(shares) and len(shares) > 5 and shares[-1] == 100
    assert all(len(line) <= 80 for line in lines)


def children(pid: int) -> list[int]:
    """The processes that one has started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


KILLED = "was ended by signal 9 (SIGKILL), often because the system is out of memory. Run the same command"
SIGNALS = [
    (True, signal.SIGKILL, 1, KILLED),
    (False, signal.SIGKILL, -9, ""),
    pytest.param(False, signal.SIGINT, 130, "", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("is_worker", "number", "code", "message"), SIGNALS)
def test_no_process_outlives_one_that_is_killed(
    subword_text: TextOf, tmp_path: Path, is_worker: bool, number: int, code: int, message: str
) -> None:
    child = start_preparing(subword_text(["".join(sentences(200)) * 20]), tmp_path / "cache")
    while len(workers := children(child.pid)) < 2 or not list((tmp_path / "cache").glob("tokens/*/progress.json")):
        assert child.poll() is None, child.communicate()
        time.sleep(0.01)
    os.kill(workers[0] if is_worker else child.pid, number)
    _, err = child.communicate(timeout=30)
    assert child.returncode == code and "Traceback" not in err and message in err, err
    while any(map(alive, workers)):
        time.sleep(0.01)


def test_an_error_in_a_process_is_reported(text_of: TextOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of the tokenizer is missing when the processes read it."""
    text = text_of(["".join(sentences(60))])
    monkeypatch.setattr("lmlong.data.tokenizers.base.Tokenizer.save", lambda self, path: None)
    with pytest.raises(LmlongError, match="a tokenizing process ended with exit code 1"):
        made_by(text, 2, tmp_path / "cache", monkeypatch)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no affinity")
def test_no_more_processes_than_this_one_may_use_cores() -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 120 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=120k", "tmpfs", str(folder)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small file system cannot be mounted here")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_full_disk_reports_the_missing_size_and_the_work_resumes(
    text_of: TextOf, small_disk: Path, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    text = text_of(sentences(60, lines=30))
    whole = content(prepare(text).folder)
    size = sum(len(data) for name, data in whole.items() if name.endswith((".tokens", ".starts")))
    monkeypatch.setenv("LMLONG_CACHE", str(small_disk))
    with small_batches(), pytest.raises(LmlongError) as error:
        prepare(text, processes=processes)
    told = r"No space left on device. (.*) MB of tokens are written; the rest needs about (.*) MB"
    sizes = re.search(told, str(error.value))
    assert sizes and str(small_disk) in str(error.value)
    written, needed = (float(number) * 1e6 for number in sizes.groups())
    assert written < 120e3 and abs(written + needed - size) < size / 3
    subprocess.run(["mount", "-o", "remount,size=4m", small_disk], check=True)
    with small_batches():
        assert content(prepare(text, processes=processes).folder) == whole
