"""Text that the tests share, and a cache of their own."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lmlong import recipe
from lmlong.data.document import Document, Skipped
from lmlong.data.sources import Source, open_source
from lmlong.data.token_file import TokenFile
from lmlong.data.tokenizers import train_tokenizer
from lmlong.data.tokenizers.base import Tokenizer

WORDS = "def return self value for in if else while import class None True index count name open close read"


def sentences(documents: int, lines: int = 40) -> list[str]:
    """Documents of code-like text, the same every time and each different."""
    draw = random.Random(0)

    def line() -> str:
        return " " * draw.choice([0, 4, 8]) + " ".join(draw.choices(WORDS.split(), k=6)) + f" {draw.random():.6f} é中😀"

    return ["\n".join(line() for _ in range(lines)) + "\n" for _ in range(documents)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for each test."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("LMLONG_CACHE", str(folder))
    return folder


@pytest.fixture(scope="session")
def subwords() -> Tokenizer:
    """A small sentencepiece tokenizer."""
    return train_tokenizer(sentences(20), recipe.Tokenizer(vocabulary=400))


@pytest.fixture(params=["bpe", "unigram", "bytes", "characters"], scope="session")
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Every kind of tokenizer in turn."""
    if request.param == "bytes":
        return train_tokenizer([], recipe.Tokenizer(kind="bytes"))
    if request.param == "characters":
        alphabet = "abcdefghijklmnopqrstuvwxyz▁\n 中é😀\0"
        return train_tokenizer([], recipe.Tokenizer(kind="characters", alphabet=alphabet, unknown="replace"))
    return train_tokenizer(sentences(20), recipe.Tokenizer(vocabulary=400, algorithm=request.param))


def text_over(*paths: Path, **options: object) -> recipe.Text:
    """The text section of a recipe over files, by default in bytes."""
    source = {"kind": "files", "paths": list(map(str, paths))}
    settings: dict[str, object] = {"sources": [source], "tokenizer": {"kind": "bytes"}, "sequence_length": 16}
    return recipe.Text.model_validate(settings | options)


TextOf = Callable[..., recipe.Text]


@pytest.fixture
def text_of(tmp_path: Path) -> TextOf:
    """The text section of a recipe over a folder that is filled with these documents."""

    def make(documents: list[str], **options: object) -> recipe.Text:
        folder = tmp_path / "documents"
        folder.mkdir(exist_ok=True)
        for number, document in enumerate(documents):
            (folder / f"{number:03}.txt").write_bytes(document.encode())
        return text_over(folder, **options)

    return make


def files(*paths: object, **options: Any) -> Source:
    return open_source(recipe.Files(kind="files", paths=list(map(str, paths)), **options), "strict")


def texts(source: Source) -> list[str]:
    return ["".join(entry.pieces()) for entry in source.documents() if isinstance(entry, Document)]


def skipped(source: Source) -> dict[str, str]:
    """The reason for each document that is skipped."""
    return {Path(entry.name).name: entry.reason for entry in source.documents() if isinstance(entry, Skipped)}


def tree(folder: Path, *names: str) -> None:
    """Files that hold their names."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def documents(file: TokenFile, tokenizer: Tokenizer) -> list[str]:
    """The texts in a token file, each checked to stand between bos and eos."""
    found = []
    for start, end in zip(file.starts, [*file.starts[1:], len(file.tokens)], strict=True):
        tokens = file.tokens[start:end].tolist()
        assert (tokens[0], tokens[-1]) == (tokenizer.bos, tokenizer.eos)
        found.append(tokenizer.decode(tokens[1:-1]))
    return found
