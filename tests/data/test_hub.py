"""Files of data sets on the hub, read by huggingface_hub from a local server."""

import gzip
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from lmlong.data.hub import COMMITS, local_file, with_commits
from lmlong.data.source_files import find_files
from lmlong.data.sources import open_source
from lmlong.errors import UsageError

from ..commands import lmlong
from .conftest import text_over, texts
from .hub_server import NAME, URL, Hub, connect, forget, serving

FILES = {
    "README.md": b"the card",
    ".gitattributes": b"hidden",
    "data/a.txt": b"text a",
    "data/b.txt": b"text a",  # the same content as a.txt
    "data/deep/c.txt.gz": gzip.compress(b"text c"),
    "data/deep/.hidden/d.txt": b"hidden",
    "data/records.jsonl": b'{"text": "one"}\n{"text": "two"}\n',
    "data/table.csv": b"text\nthree\n",
    "data/old.doc": b"refused",
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A server with one data set, which this process reads by an empty cache."""
    with serving() as server:
        server.repositories[NAME].commit(FILES)
        connect(server.url, tmp_path / "hf", monkeypatch)
        yield server


def read(*urls: str) -> list[str]:
    source = open_source(text_over(*urls).sources[0], "strict")  # type: ignore[arg-type]
    return texts(source)


def test_a_folder_is_read_as_on_disk_but_for_the_card(hub: Hub) -> None:
    assert read(URL) == ["text a", "text a", "text c", "one", "two"]
    left_out = {Path(entry.name).name: entry.reason for entry in find_files([URL], "text").left_out}
    assert left_out["README.md"].startswith("describes the data set") and left_out[".gitattributes"] == "hidden"
    assert left_out["d.txt"] == "hidden" and left_out["table.csv"].startswith("may hold no records")
    assert "old.doc" not in hub.downloads() and "table.csv" not in hub.downloads()


MATCHES = {
    "data/a.txt": ["text a"],
    "README.md": ["the card"],
    "data/table.csv": ["three"],
    "data/deep": ["text c"],
    "data/*.txt": ["text a", "text a"],
    "data/**/*.txt*": ["text a", "text a", "text c"],
    "*/[b-z]*": ["text a", "one", "two", "three"],
    "data/deep/.hid*/*": ["hidden"],
}


@pytest.mark.parametrize("path", MATCHES)
def test_a_path_or_glob_reads_what_it_matches_only(hub: Hub, path: str) -> None:
    assert read(f"{URL}/{path}") == MATCHES[path]
    wanted = {file.name for file in find_files([f"{URL}/{path}"], "text").files}
    assert set(hub.downloads()) <= wanted  # the same content is downloaded once


def test_a_commit_that_was_read_needs_no_network(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = with_commits(text_over(f"{URL}/data/*.txt")).sources[0].paths  # type: ignore[arg-type,union-attr]
    first = read(*pinned)
    forget(monkeypatch)
    hub.log.clear()
    assert read(*pinned) == first and hub.log == []
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    assert read(f"{URL}/data/*.txt") == first, "a branch, as the cache has it"


def test_a_revision_is_one_commit_for_a_process_and_for_a_text_that_had_it(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = hub.repositories[NAME]
    repository.commit({"a.txt": b"of the branch"}, "dev/next")
    repository.commit({"a.txt": b"converted"}, "refs/convert/parquet")
    assert read(f"{URL}@dev%2Fnext/a.txt", f"{URL}@refs/convert/parquet/a.txt") == ["of the branch", "converted"]
    text = text_over(f"{URL}/data/a.txt", "local.txt")  # type: ignore[arg-type]
    before = with_commits(text)
    assert read(f"{URL}/data/a.txt") == ["text a"]
    repository.commit({"data/a.txt": b"newer"})
    assert read(f"{URL}/data/a.txt") == ["text a"]
    forget(monkeypatch)
    assert with_commits(text, before) == with_commits(before) == before != with_commits(text)


NOT_PATHS = (
    *("hf://owner/model/a.txt", "hf://spaces/owner/set/a.txt", "hf://datasets/owner", "hf://datasets/../set/a"),
    *(f"{URL}@{revision}/a" for revision in ("..%2F..%2Fx", "%00", "a%0A", "%2F", "\ud800")),
    *(f"{URL}@{'0' * 40}/{path}" for path in ("../../x", "data/../../../x", ".", "a\0")),
)
MISTAKES = {
    "hf://datasets/owner/none/a": "no such data set, or a private one",
    f"{URL}@none/data": "no such revision",
    f"{URL}/data/a.tx": "no such file or folder. Did you mean 'data/a.txt'?",
    f"{URL}/dta": "Did you mean 'data'?",
    f"{URL}/zzzzzzzz*": "It has data, data/deep",
    f"{URL}/data/old.doc": "an unsupported document format",
    **dict.fromkeys(NOT_PATHS, "not a path of a data set"),
}


def test_mistakes_are_reported_together(hub: Hub) -> None:
    with pytest.raises(UsageError, match=f"^{len(MISTAKES) + 1} files or paths") as caught:
        find_files([*MISTAKES, "nowhere.txt"], "text")
    lines = str(caught.value).split("\n")[1:]
    for message, line in zip([*MISTAKES.values(), "nowhere.txt"], lines, strict=True):
        assert message in line


def test_a_gated_data_set_is_refused_with_how_to_log_in(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repositories[NAME].gated = True
    with pytest.raises(UsageError, match=f"Ask for it at {hub.url}/datasets/{NAME}, and log in: set HF_TOKEN"):
        read(f"{URL}/data/a.txt")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert read(f"{URL}/data/a.txt") == ["text a"]


def test_without_a_network_the_error_names_the_endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        connect(f"http://127.0.0.1:{unused.getsockname()[1]}", tmp_path, monkeypatch)
    with pytest.raises(UsageError, match=r"cannot be read from http://127.0.0.1.*HF_HUB_OFFLINE=1"):
        read(URL)


def test_offline_the_cache_is_read(hub: Hub, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    assert read(f"{URL}/data/*.txt") == ["text a", "text a"]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for listings_kept in (True, False):
        if not listings_kept:  # as after `hf download`
            for kept in (cache / "hub").iterdir():
                kept.unlink()
        forget(monkeypatch)
        hub.log.clear()
        assert read(f"{URL}/data/*.txt") == ["text a", "text a"]
        assert read(f"{URL}/data/a.txt") == ["text a"] and hub.log == []
    for missing in (f"{URL}@dev/data", "hf://datasets/owner/other/a"):
        with pytest.raises(UsageError, match=r"not in the hub's cache .* HF_HUB_OFFLINE is set"):
            read(missing)


def test_a_download_that_is_cut_off_continues(hub: Hub) -> None:
    data = os.urandom(1 << 16).hex().encode()
    hub.repositories[NAME].commit({"big.txt": data})
    hub.bytes_until_cut = 1000
    assert read(f"{URL}/big.txt") == [data.decode()]
    assert len(hub.downloads()) == 2


def test_a_killed_download_is_done_again_without_the_finished_files(hub: Hub, tmp_path: Path) -> None:
    hub.repositories[NAME].commit({"a.txt": b"first", "b.txt": b"x" * 50_000})
    code = f"""
import os, signal, sys
from lmlong.data import hub
from lmlong.report.progress import Progress

update = Progress.update
def kill(self, size):
    update(self, size)
    if self.done > 10_000:
        os.kill(os.getpid(), signal.SIGKILL)
Progress.update = kill
found = hub.find_on_hub("{URL}")
found.download(["a.txt"])
found.download(["b.txt"])
"""
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_CACHE": constants.HF_HUB_CACHE, COMMITS: "{}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == -9, done.stderr
    hub.log.clear()
    assert read(URL) == ["first", "x" * 50_000]
    assert hub.downloads() == ["b.txt"]


LEAVING = ["\0", "\ud800", "../../evil.txt", "/evil.txt", "data/../../evil.txt", "data\\evil.txt", "C:evil.txt"]


@pytest.mark.parametrize("name", LEAVING)
def test_a_path_that_leaves_the_cache_is_refused(hub: Hub, name: str) -> None:
    hub.listed["data/a.txt"] = name
    with pytest.raises(UsageError, match="which is not a path in the data set"):
        read(URL)
    assert hub.downloads() == []


def test_a_commit_that_is_no_hash_or_another_one_is_refused(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = hub.repositories[NAME]
    commit = repository.branches["main"]
    repository.branches[commit] = repository.commit({"data/a.txt": b"other"}, "other")
    with pytest.raises(UsageError, match="another commit"):
        read(f"{URL}@{commit}/data/a.txt")
    repository.commits["../../x"] = FILES
    repository.branches["main"] = "../../x"
    forget(monkeypatch)
    with pytest.raises(UsageError, match="instead of a commit"):
        read(URL)


def test_commands_read_hub_files(hub: Hub) -> None:
    shown = lmlong("data", "show", f"{URL}/data/deep", "--all")
    assert (shown.returncode, shown.stdout) == (0, "text c\n"), shown.stderr
    assert local_file(f"{URL}/data/a.txt").read_text() == "text a"
    with pytest.raises(UsageError, match=r"matches 2 files\. Name one"):
        local_file(f"{URL}/data/*.txt")
