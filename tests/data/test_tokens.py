"""Token files hold the documents, once, complete or not at all, in memory that does not grow with the text."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmlong import recipe
from lmlong.data.token_dataset import prepare
from lmlong.data.token_file import TokenFile
from lmlong.data.tokenizers.base import Tokenizer
from lmlong.errors import UsageError

from .conftest import sentences

TextOf = Callable[..., recipe.Text]


def documents(file: TokenFile, tokenizer: Tokenizer) -> list[str]:
    """The texts in a token file, each checked to stand between bos and eos."""
    found = []
    for start, end in zip(file.starts, [*file.starts[1:], len(file.tokens)], strict=True):
        tokens = file.tokens[start:end].tolist()
        assert (tokens[0], tokens[-1]) == (tokenizer.bos, tokenizer.eos)
        found.append(tokenizer.decode(tokens[1:-1]))
    return found


def folders(cache: Path) -> list[Path]:
    return sorted(path for path in (cache / "tokens").iterdir() if not path.name.endswith(".lock"))


def test_several_sources_and_validation_of_its_own(tmp_path: Path) -> None:
    for name in ("one", "two", "held"):
        (tmp_path / f"{name}.txt").write_text(f"the text of {name} " * 10)
    one, two, held = (
        {"kind": "files", "paths": [str(tmp_path / f"{name}.txt")], "weight": weight}
        for name, weight in (("one", 1.0), ("two", 3.0), ("held", 1.0))
    )
    options = {"sources": [one, two], "validation": {"sources": [held]}, "tokenizer": {"kind": "bytes"}}
    found = prepare(recipe.Text.model_validate(options | {"sequence_length": 16}))
    assert [documents(file, found.tokenizer) for file in (*found.train, found.validation)] == [
        [f"the text of {name} " * 10] for name in ("one", "two", "held")
    ]
    assert found.weights == [1.0, 3.0]
    assert [set(source) & {"train", "validation"} for source in found.info["sources"]] == [
        *({"train", "validation"}, {"train", "validation"}, {"validation"}),
    ]


def test_the_tokenizer_sees_no_validation_text(text_of: TextOf) -> None:
    options = {"tokenizer": {"vocabulary": 300}, "validation": {"fraction": 0.5}}
    before = prepare(text_of(["known " * 100 + "secret" * 100], **options))
    after = prepare(text_of(["known " * 100 + "poison" * 100], **options))
    assert before.folder != after.folder
    assert before.tokenizer.hash == after.tokenizer.hash


def test_the_same_content_is_made_once(text_of: TextOf, cache: Path) -> None:
    texts = sentences(30)
    first = prepare(text_of(texts))
    made = (first.folder / "train-0.tokens").stat().st_mtime_ns
    again = prepare(text_of(texts, sequence_length=32))
    assert (again.folder, (again.folder / "train-0.tokens").stat().st_mtime_ns) == (first.folder, made)
    assert folders(cache) == [first.folder]
    assert prepare(text_of([*texts[:-1], "other"])).folder != first.folder
    assert prepare(text_of(texts, validation={"fraction": 0.3})).folder != first.folder


def test_a_given_tokenizer_replaces_the_one_of_the_recipe(text_of: TextOf, subwords: Tokenizer, tmp_path: Path) -> None:
    """A run that is resumed or evaluated names its own tokenizer, and must not tokenize its corpus again."""
    usual, given = prepare(text_of(sentences(30))), prepare(text_of(sentences(30)), tokenizer=subwords)
    assert given.tokenizer.hash == subwords.hash and given.folder != usual.folder
    subwords.save(tmp_path / "own.model")
    text = text_of(sentences(30), tokenizer={"kind": "sentencepiece", "path": str(tmp_path / "own.model")})
    assert prepare(text).folder == given.folder


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        (
            *(["x" * 100], {"sequence_length": 2048}),
            r"the training text has 97 tokens, but one sequence needs 2,049\. Add text or lower",
        ),
        (
            *(sentences(25), {"validation": {"fraction": 1e-9}}),
            r"of 25 documents, text.validation.fraction=1e-09 holds out none",
        ),
    ],
)
def test_too_little_text_is_refused(text_of: TextOf, texts: list[str], options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        prepare(text_of(texts, **options))


def test_token_files_have_a_simple_format_and_are_mapped(text_of: TextOf) -> None:
    found = prepare(text_of(sentences(30)))
    info = json.loads((found.folder / "info.json").read_text())
    raw = np.fromfile(found.folder / "train-0.tokens", dtype="<u2")
    assert len(raw) == info["sources"][0]["train"]["tokens"]
    assert raw[0] == found.tokenizer.bos
    assert isinstance(found.train[0].tokens, np.memmap) and np.array_equal(found.train[0].tokens, raw)
    size, starts = found.train[0].starts[1] + 1, found.train[0].starts.tolist()
    assert found.train[0].first(size).starts.tolist() == starts[:2] and len(found.train[0].first(size).tokens) == size
    assert found.train[0].first(None).starts.tolist() == starts


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
    import gzip

    def peak(megabytes: int) -> int:
        path = tmp_path / f"{megabytes}{suffix}"
        with gzip.open(path, "wb", 1) if suffix.endswith("gz") else path.open("wb") as file:
            for _ in range(megabytes):
                file.write(b"0123456789abcde\n" * 62_500)
        done = subprocess.run([sys.executable, "-c", PEAK, path], capture_output=True, text=True, check=True)
        return int(done.stdout) // 1024

    assert peak(32) - peak(1) < 12


def test_tokens_do_not_depend_on_the_names_of_files(text_of: TextOf) -> None:
    text = text_of(sentences(60))
    found = prepare(text)
    folder = Path(text.sources[0].paths[0])  # type: ignore[union-attr]
    for path in folder.iterdir():
        path.rename(folder / f"a-{path.name}")
    assert prepare(text).folder == found.folder
