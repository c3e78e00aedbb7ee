"""A folder as a user has it: texts, recipes, a plug-in, and a run of two steps."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from commands import Finished
from commands import lmlong as call_lmlong
from data.made_documents import html, zipped
from machine import new_cache

from lmlong.attention.plugins import LOADED, unload_plugin

TWO_GATES = Path(__file__).parents[1] / "plugins" / "two_gates.py"
RECIPE = """\
text: {sources: [{kind: files, paths: [book.txt]}], tokenizer: {kind: bytes}, sequence_length: 16}
model: {width: 16, layers: 1, heads: 2}
training: {steps: 2, batch_size: 2, warmup_steps: 1, log_every: 1, precision: "32"}
"""
PLUGIN_RECIPE = """\
text: {sources: [{kind: files, paths: [book.txt]}], tokenizer: {kind: bytes}, sequence_length: 32}
model: {width: 16, layers: 2, heads: 2, attention: {kind: [two_gates, linear], two_gates: {memory: 50}}}
training: {steps: 6, batch_size: 2, warmup_steps: 1, checkpoint_every: 2, log_every: 1, precision: "32"}
"""
FILES = {
    "book.txt": b"once upon a time there was a book. " * 100,
    "latin.txt": b"caf\xe9 " * 200,
    "newlines.txt": b"\n" * 5000,
    "mine.yaml": RECIPE.encode(),
    "bare.yaml": PLUGIN_RECIPE.encode(),
    "gates.yaml": f"plugins: [two_gates.py]\n{PLUGIN_RECIPE}".encode(),
    "two_gates.py": TWO_GATES.read_bytes(),
    "image.png": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR",
    "zipped.txt": zipped({"a": b"x"}),
    "several.zip": zipped({"a.txt": b"x"}),
    "old.doc": b"x",
    "damaged.gz": b"x",
    "page.html": html(),
    "good.jsonl": b'"a"\n',
    "second.jsonl": b'"a"\n{"text": "b"}\n',
    "plain.jsonl": b"a\n",
    "empty.jsonl": b"",
}

Command = Callable[..., Finished]


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    for name, data in FILES.items():
        (folder / name).write_bytes(data)
    for name in ("pipe", "pipe.py"):
        os.mkfifo(folder / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LMLONG_CACHE", str(new_cache(folder)))
        assert call_lmlong("train", "mine.yaml", "--out", "run", cwd=folder).returncode == 0
    return folder


@pytest.fixture
def lmlong(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Command]:
    """A command in this folder, whose plug-ins are unloaded afterwards."""
    monkeypatch.setenv("LMLONG_CACHE", str(place / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # hides a GPU

    def run(*words: object) -> Finished:
        try:
            return call_lmlong(*words, cwd=place)
        finally:
            for name in list(LOADED):
                unload_plugin(name)

    yield run
