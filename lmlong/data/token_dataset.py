"""Token files in the cache, written once for each content of the sources and each tokenizer.

A folder of the cache holds tokenizer.model, info.json, validation.tokens, train-0.tokens and so on for each training
source, and for each token file a file of document positions. With labels, labels.json holds those of the documents of
each token file.
"""

import errno
import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from lmlong import recipe
from lmlong.data.document import Skipped
from lmlong.data.duplicates import divided, split_key
from lmlong.data.labels import DocumentLabels
from lmlong.data.sources import Source, check_sources, open_sources, size_of
from lmlong.data.split import Part
from lmlong.data.text_info import Info, Read, SourceInfo, by_reason
from lmlong.data.token_encoding import Batch, Cut, Destination, batches_of, cores, encode_all
from lmlong.data.token_file import POSITIONS, Count, TokenFile, check_tokens, read_tokens, starts_path
from lmlong.data.token_file_writer import VALIDATION, TokenFileWriter, token_file
from lmlong.data.tokenizers import load_tokenizer
from lmlong.data.tokenizers.base import Tokenizer, parts
from lmlong.data.tokenizers.training import tokenizer_of
from lmlong.data.windows import overlap
from lmlong.errors import LmlongError, UsageError
from lmlong.io import folder_manifest
from lmlong.io.cache import cache_folder, fetch, key_of
from lmlong.io.folder_manifest import DamagedFolder, Format
from lmlong.report.progress import Progress

FORMAT = Format("tokens", 4)

INFO = "info.json"

LABELS, OF_FILES = "labels.json", TypeAdapter(dict[str, list[str]], config={"strict": True})
"""The labels of all documents, by the names of the token files."""

TEXT = (".tokens", ".starts", LABELS)
"""Suffixes of the files that hold the text and its labels."""

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a full disk."""


class TokenDataset(NamedTuple):
    """The tokens of a recipe's text, and their tokenizer, weights and description."""

    folder: Path
    tokenizer: Tokenizer
    train: list[TokenFile]  # one for each source
    weights: list[float]  # of the sources
    validation: TokenFile
    info: dict[str, Any]  # what was read, skipped and written
    identity: str  # equal for equal tokens, wherever the text was stored

    @property
    def train_tokens(self) -> int:
        """The number of training tokens in all sources."""
        return sum(len(source.tokens) for source in self.train)


def prepare(text: recipe.Text, tokenizer: Tokenizer | None = None, processes: int | None = None) -> TokenDataset:
    """Return the tokens of a recipe's text, cached. `tokenizer` replaces the recipe's.

    `processes`, by default one for each core, encode the text; their number does not affect the tokens. Interrupted
    work is resumed.
    """
    sources = open_sources(text)
    chosen = tokenizer or tokenizer_of(sources, text.tokenizer, text.duplicates)
    labels = [] if text.labels is None else [LABELS, text.labels.field]
    key = key_of(FORMAT, chosen.hash, *split_key(sources, text.duplicates), *labels)
    folder = fetch(
        cache_folder() / "tokens" / key,
        FORMAT,
        lambda unfinished: _write(unfinished, sources, chosen, text, processes or cores()),
        resumable=True,
        check=lambda folder: _check_readable(folder, len(text.sources), len(sources)),
    )
    tokens = _open(folder, [options.weight for options in text.sources], text.labels is not None)
    for source, info in zip(sources, tokens.info["sources"], strict=True):  # known without reading, so never cached
        info["left_out"] = by_reason(source.left_out)
    _check(tokens, text)
    return tokens


def _open(folder: Path, weights: list[float], labelled: bool) -> TokenDataset:
    tokenizer, names = load_tokenizer(folder / "tokenizer.model"), _token_files(len(weights))
    labels = OF_FILES.validate_json((folder / LABELS).read_bytes()) if labelled else {}
    *train, validation = (read_tokens(folder / name, tokenizer)._replace(labels=labels.get(name, ())) for name in names)
    files = folder_manifest.read_manifest(folder, FORMAT).files
    identity = key_of(tokenizer.hash, [(name, files[name]["sha256"]) for name in files if name.endswith(TEXT)])
    info = Info.model_validate_json((folder / INFO).read_bytes()).model_dump(exclude_none=True)
    return TokenDataset(folder, tokenizer, train, weights, validation, info, identity)


def _token_files(sources: int) -> list[str]:
    return [*(f"train-{number}.tokens" for number in range(sources)), VALIDATION]


def _check_readable(folder: Path, trained: int, sources: int) -> None:
    """Raise DamagedFolder or UsageError unless the files of a folder are what `write` writes."""
    try:
        tokenizer = load_tokenizer(folder / "tokenizer.model")
        for name in _token_files(trained):
            check_tokens(folder / name, tokenizer)
        if (folder / LABELS).exists() and not _agree(folder, _token_files(trained)):
            raise ValueError
        if len(Info.model_validate_json((folder / INFO).read_bytes()).sources) != sources:
            raise ValueError
    except OSError as error:
        raise DamagedFolder(f"{error.filename}: {error.strerror}.") from None
    except ValueError:
        raise DamagedFolder(f"{folder / INFO}: damaged.") from None


def _check(tokens: TokenDataset, text: recipe.Text) -> None:
    """Raise UsageError if a text is too short to train or to validate on."""
    need = text.sequence_length + 1 if text.rows == "windows" else 2
    for file, source in zip(tokens.train, tokens.info["sources"], strict=False):
        if len(file.tokens) < need:
            raise UsageError(
                f"{source['name']}: the training text has {len(file.tokens):,} tokens, but one sequence needs "
                f"{need:,}. Add text or lower text.sequence_length."
            )
    if not len(tokens.validation.tokens) and text.validation.sources:
        raise UsageError("the validation text is empty: text.validation.sources hold no text. Name others.")
    if not len(tokens.validation.tokens):
        documents = sum(source["read"]["documents"] for source in tokens.info["sources"])
        raise UsageError(
            f"the validation text is empty: of {documents:,} documents, text.validation.fraction="
            f"{text.validation.fraction} holds out none. Raise it, or name text.validation.sources."
        )


def _agree(folder: Path, names: list[str]) -> bool:
    """Return whether there is a label for each document of the token files."""
    labels = OF_FILES.validate_json((folder / LABELS).read_bytes())
    sizes = {name: starts_path(folder / name).stat().st_size for name in names}
    return all(len(labels.get(name, ())) == size // POSITIONS.itemsize for name, size in sizes.items())


def _write(folder: Path, sources: list[Source], tokenizer: Tokenizer, text: recipe.Text, processes: int) -> None:
    """Write the token files to a folder, or resume interrupted work in it."""
    check_sources(sources)
    model = folder / "tokenizer.model"
    tokenizer.save(model)
    infos = [SourceInfo(name=source.name) for source in sources]
    destinations = [
        Destination(number, split)
        for number, source in enumerate(sources)
        for split in (("train", "validation") if source.held_out < 1 else ("validation",))
    ]
    names = set(map(token_file, destinations))
    labels = None if text.labels is None else DocumentLabels(text.labels.field, names)
    with (
        closing(TokenFileWriter(folder, names)) as files,
        Progress("tokens", size_of(sources)) as progress,
        _full_disk(files, progress),
    ):
        batches = batches_of(_cuts(divided(sources, text.duplicates), infos, tokenizer, labels))
        _pass_over(batches, files, progress)
        with closing(encode_all(batches, tokenizer, model, processes)) as encoded:
            for batch in encoded:
                files.write(batch)
                progress.update(sum(tokens.bytes for tokens in batch.values()))
        files.save()
        if labels is not None:
            (folder / LABELS).write_text(json.dumps(labels.of_file))
        for destination in destinations:
            setattr(infos[destination.source], destination.split, files.counts.get(destination, Count()))
        train = [read_tokens(folder / name, tokenizer) for name in sorted(names - {VALIDATION})]
        info = Info(
            tokenizer=tokenizer.hash,
            vocabulary=tokenizer.vocabulary,
            sources=infos,
            overlap=overlap(train, read_tokens(folder / VALIDATION, tokenizer), tokenizer),
        )
        files.discard()
        (folder / INFO).write_text(json.dumps(info.model_dump(exclude_none=True), indent=2) + "\n")


def _cuts(
    sources: list[Iterator[Part | Skipped]],
    infos: list[SourceInfo],
    tokenizer: Tokenizer,
    labels: DocumentLabels | None,
) -> Iterator[tuple[Destination, Cut]]:
    """Cut documents for the tokenizer. Yield each cut with its destination; empty documents have none."""
    for number, (documents, info) in enumerate(zip(sources, infos, strict=True)):
        for part in documents:
            info.add(part)
            if isinstance(part, Skipped):
                continue
            destination, begins, last = Destination(number, part.split), True, ""
            for text in parts(_readable(part, tokenizer, info.read)):
                if last:
                    yield destination, Cut(last, begins, False)
                    begins = False
                last = text
            if last:
                yield destination, Cut(last, begins, True)
                if labels is not None:
                    labels.add(token_file(destination), part.document)


def _readable(part: Part, tokenizer: Tokenizer, read: Read) -> Iterator[str]:
    """Yield the text of a part. Count characters missing from the tokenizer's alphabet, or raise an error."""
    for piece in part.pieces():
        if replaced := tokenizer.count_replaced(piece, part.document):
            read.replaced_characters = (read.replaced_characters or 0) + replaced
        yield piece


def _pass_over(batches: Iterator[Batch], files: TokenFileWriter, progress: Progress) -> None:
    """Read the batches again that are in the files already, for the counts and to reach the next batch."""
    passed = 0
    for batch in islice(batches, files.batches):
        progress.skip(sum(len(cut.text.encode("utf-8", "surrogatepass")) for cuts in batch.values() for cut in cuts))
        passed += 1
    if passed < files.batches:
        files.discard()
        raise UsageError("the text became shorter while it was read. Try again when it is complete.")


@contextmanager
def _full_disk(files: TokenFileWriter, progress: Progress) -> Iterator[None]:
    """If the disk is full, report how much space is needed."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        need = "the rest needs an unknown size"
        if progress.total and progress.done:
            rest = files.size * max(progress.total / progress.done - 1, 0)
            need = f"the rest needs about {rest / 1e6:,.1f} MB"
        raise LmlongError(
            f"{files.folder}: {error.strerror}. {files.size / 1e6:,.1f} MB of tokens are written; {need}. Free some "
            "space and run the same command again, which resumes; or set LMLONG_CACHE to a folder on another disk."
        ) from error
