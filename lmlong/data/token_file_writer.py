"""The token files of a text, written in text order by one process to a folder of the cache.

At intervals the files are flushed, and progress.json records the number of batches in them, and each file's size and
sha256. Interrupted work resumes from there: the text is read again, which is fast, but its first batches are not
encoded again.
"""

import os
from contextlib import ExitStack, closing, suppress
from dataclasses import astuple
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lmlong.data import token_encoding
from lmlong.data.token_encoding import Destination, Encoded
from lmlong.data.token_file import Count, starts_path
from lmlong.io import files
from lmlong.io.cache import PROGRESS

if TYPE_CHECKING:
    from hashlib import _Hash

VALIDATION = "validation.tokens"

BATCHES_PER_SAVE = 64


class SavedProgress(NamedTuple):
    """The content of progress.json."""

    batches: int  # in the files
    files: dict[str, tuple[int, "_Hash"]]  # name -> size and sha256
    counts: dict[Destination, Count]


class TokenFileWriter:
    """Writes the token files of a folder: one for each source's training text, and one for the validation text.

    Use it as `with closing(TokenFileWriter(folder, names)): ...`.
    """

    def __init__(self, folder: Path, names: set[str]):
        self.folder = folder
        every = {name for path in names for name in (path, starts_path(Path(path)).name)}
        saved = _saved_progress(folder, every)
        self.batches = saved.batches
        """Number of batches in the files."""
        self.counts = saved.counts
        self._stack = ExitStack()
        self._files = {
            name: self._stack.enter_context(closing(_File(folder / name, *saved.files.get(name, (0, sha256())))))
            for name in sorted(every)
        }
        self._sizes = {path: self._files[starts_path(Path(path)).name] for path in names}

    def write(self, encoded: dict[Destination, Encoded]) -> None:
        """Append the tokens of the next batch."""
        for destination, batch in encoded.items():
            path = token_file(destination)
            tokens, starts = self._files[path], self._sizes[path]
            starts.write((batch.starts + tokens.size // batch.tokens.itemsize).tobytes())
            tokens.write(batch.tokens.tobytes())
            count = Count(len(batch.starts), batch.bytes, len(batch.tokens))
            self.counts[destination] = self.counts.get(destination, Count()).add(count)
        self.batches += 1
        if self.batches % BATCHES_PER_SAVE == 0:
            self.save()

    @property
    def size(self) -> int:
        """Return the size of all files in bytes."""
        return sum(file.size for file in self._files.values())

    def save(self) -> None:
        """Flush the files to disk, and record the progress."""
        for file in self._files.values():
            file.flush()
        progress = {
            "characters": token_encoding.BATCH,
            "batches": self.batches,
            "files": {name: [file.size, file.digest] for name, file in self._files.items()},
            "counts": [[*destination, *astuple(count)] for destination, count in self.counts.items()],
        }
        files.atomic_write(self.folder / PROGRESS, files.with_checksum(progress))

    def discard(self) -> None:
        """Remove the progress, so that later work does not resume from these files."""
        for path in (self.folder / PROGRESS, files.staged(self.folder / PROGRESS)):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        self._stack.close()


def token_file(destination: Destination) -> str:
    """Return the name of a destination's token file."""
    return VALIDATION if destination.split == "validation" else f"train-{destination.source}.tokens"


class _File:
    """A file to append to, with its sha256. It is truncated to `size` bytes first."""

    def __init__(self, path: Path, size: int, digest: "_Hash"):
        self._file = path.open("r+b" if size else "wb", buffering=0)
        self._sha256, self.size = digest, size
        self._file.truncate(size)
        self._file.seek(size)

    @property
    def digest(self) -> str:
        return self._sha256.hexdigest()

    def write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:  # a nearly full disk accepts only part of it
            rest = rest[self._file.write(rest) :]
        self._sha256.update(data)
        self.size += len(data)

    def flush(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _saved_progress(folder: Path, names: set[str]) -> SavedProgress:
    """Return the progress of the files in a folder. Return none if a file does not match it."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        saved = files.read_checksummed((folder / PROGRESS).read_bytes())
        counts = {Destination(source, split): Count(*count) for source, split, *count in saved["counts"]}
        sizes = {name: size for name, (size, _) in saved["files"].items()}
        numbers = [saved["batches"], *sizes.values(), *chain.from_iterable(map(astuple, counts.values()))]
        is_whole = (
            saved["characters"] == token_encoding.BATCH and sizes.keys() == names and all(map(_is_count, numbers))
        )
        if is_whole and all(size <= (folder / name).stat().st_size for name, size in sizes.items()):
            hashed = {name: (size, _hash(folder / name, size)) for name, size in sizes.items()}
            if all(hashed[name][1].hexdigest() == digest for name, (_, digest) in saved["files"].items()):
                return SavedProgress(saved["batches"], hashed, counts)
    return SavedProgress(0, {}, {})


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _hash(path: Path, size: int) -> "_Hash":
    """Return the sha256 of the first bytes of a file."""
    digest = sha256()
    with path.open("rb") as file:
        while chunk := file.read(min(size, 1 << 20)):
            digest.update(chunk)
            size -= len(chunk)
    return digest
