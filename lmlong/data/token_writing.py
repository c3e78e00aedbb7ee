"""Write the token files of a recipe's text to a folder of the cache, and describe what was read and skipped."""

import errno
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from lmlong.data.document import Skipped
from lmlong.data.duplicates import Duplicates, divide
from lmlong.data.encoding import UTF8
from lmlong.data.notes import count
from lmlong.data.sources import Input, check_inputs, size_of
from lmlong.data.split import Part, Split
from lmlong.data.token_encoding import Batch, Cut, Destination, batches_of, encode_all
from lmlong.data.token_file import Count, read_tokens
from lmlong.data.token_file_writer import VALIDATION, TokenFileWriter, token_file
from lmlong.data.tokenizers.base import Tokenizer, parts
from lmlong.data.tokenizers.characters import CharacterTokenizer
from lmlong.data.windows import overlap
from lmlong.errors import LmlongError, UsageError
from lmlong.report.progress import Progress

FULL = (errno.ENOSPC, errno.EDQUOT)

NEAR_COPY = "a near-copy of training text"


def write(folder: Path, inputs: list[Input], tokenizer: Tokenizer, duplicates: Duplicates, processes: int) -> None:
    """Write the token files to a folder, or resume interrupted work in it."""
    check_inputs(inputs)
    model = folder / "tokenizer.model"
    tokenizer.save(model)
    sources = [_Source(entry) for entry in inputs]
    names = {
        token_file(destination) for number, source in enumerate(sources) for destination in source.destinations(number)
    }
    with (
        closing(TokenFileWriter(folder, names)) as files,
        Progress("tokens", size_of(inputs)) as progress,
        _full_disk(files, progress),
    ):
        batches = batches_of(_cuts(divide(inputs, duplicates), sources, tokenizer))
        _pass_over(batches, files, progress)
        with closing(encode_all(batches, tokenizer, model, processes)) as encoded:
            for batch in encoded:
                files.write(batch)
                progress.update(sum(tokens.bytes for tokens in batch.values()))
        files.save()
        described = [source.described(number, files.counts) for number, source in enumerate(sources)]
        train = [read_tokens(folder / name, tokenizer) for name in sorted(names - {VALIDATION})]
        info = {
            "tokenizer": tokenizer.hash,
            "vocabulary": tokenizer.vocabulary,
            "sources": described,
            "overlap": overlap(train, read_tokens(folder / VALIDATION, tokenizer), tokenizer),
        }
        files.discard()
        (folder / "info.json").write_text(json.dumps(info, indent=2) + "\n")


class _Source:
    """Counts of what was read of a source and skipped."""

    def __init__(self, entry: Input):
        self._name = entry.source.name
        self._splits: tuple[Split, ...] = ("train", "validation") if entry.held_out < 1 else ("validation",)
        self._read = Counter({"documents": 0, "bytes": 0, "replaced_bytes": 0, "put_in_bytes": 0, "recoded_bytes": 0})
        self._skipped: dict[str, dict[str, Any]] = {}
        self._encodings: dict[str, dict[str, Any]] = {}
        self._near_copies: dict[str, dict[str, Any]] = {}

    def destinations(self, number: int) -> list[Destination]:
        """Return the destinations of the source's tokens. `number`: the source's number."""
        return [Destination(number, split) for split in self._splits]

    def add(self, part: Part | Skipped) -> None:
        """Count a skipped document, or a document by its first part."""
        if isinstance(part, Skipped):
            count(self._skipped, part)
        elif part.start == 0:
            measure = part.read
            replaced, put_in = measure.replaced_bytes, measure.put_in_bytes
            change = measure.bytes - put_in - (measure.read_bytes - replaced)  # from another encoding to UTF-8
            self._read.update(documents=1, bytes=measure.read_bytes, replaced_bytes=replaced, put_in_bytes=put_in)
            self._read.update(recoded_bytes=change)
            if part.near_copy:
                count(self._near_copies, Skipped(part.document.name, NEAR_COPY, measure.bytes))
            if part.document.encoding != UTF8:
                count(self._encodings, Skipped(part.document.name, part.document.encoding, measure.read_bytes))

    def pieces(self, part: Part, tokenizer: Tokenizer) -> Iterator[str]:
        """Yield the text of a part. Count characters missing from the tokenizer's alphabet, or raise an error."""
        for piece in part.pieces():
            if isinstance(tokenizer, CharacterTokenizer) and (outside := len(tokenizer.outside(piece))):
                if tokenizer.unknown == "error":
                    raise tokenizer.unknown_in(part.document)
                self._read["replaced_characters"] += outside
            yield piece

    def described(self, number: int, counts: dict[Destination, Count]) -> dict[str, Any]:
        """Return the description of the source: what was read, skipped and written."""
        splits: dict[str, Any] = {
            destination.split: counts.get(destination, Count())._asdict() for destination in self.destinations(number)
        }
        return {
            "name": self._name,
            "read": self._read,
            "skipped": self._skipped,
            "encodings": self._encodings,
            "near_copies": self._near_copies.get(NEAR_COPY, {"documents": 0, "bytes": 0, "names": []}),
            **splits,
        }


def _cuts(
    entries: Iterable[tuple[int, Part | Skipped]], sources: list[_Source], tokenizer: Tokenizer
) -> Iterator[tuple[Destination, Cut]]:
    """Cut documents for the tokenizer. Yield each cut with its destination; empty documents have none."""
    for number, part in entries:
        sources[number].add(part)
        if isinstance(part, Skipped):
            continue
        destination, begins, last = Destination(number, part.split), True, ""
        for text in parts(sources[number].pieces(part, tokenizer)):
            if last:
                yield destination, Cut(last, begins, False)
                begins = False
            last = text
        if last:
            yield destination, Cut(last, begins, True)


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
