"""The token files of a text, written in the order of the text by one process, in a folder of the cache.

Now and then what is written is flushed, and progress.json says how far it goes: the number of batches that are in the
files, and the size and sha256 of each file by then. Work that was cut off goes on from there: the text is read again,
which is fast, and what stands in the files already is not encoded again.
"""

import os
from contextlib import ExitStack, closing
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

SHARD = 64
"""Batches after which what is written is made safe."""


class Begun(NamedTuple):
    """What progress.json says."""

    batches: int  # that are in the files
    files: dict[str, tuple[int, "_Hash"]]  # name -> bytes, and their sha256
    counts: dict[Destination, Count]


class TokenFiles:
    """The token files of a folder: those of each source's training text, and that of the validation text.

    Use it as `with closing(TokenFiles(folder, names)): ...`.
    """

    def __init__(self, folder: Path, names: set[str]):
        self.folder = folder
        every = {name for path in names for name in (path, starts_path(Path(path)).name)}
        begun = _begun(folder, every)
        self.batches = begun.batches
        """Batches of the text that are in the files."""
        self.counts = begun.counts
        self._stack = ExitStack()
        self._files = {
            name: self._stack.enter_context(closing(_File(folder / name, *begun.files.get(name, (0, sha256())))))
            for name in sorted(every)
        }
        self._sizes = {path: self._files[starts_path(Path(path)).name] for path in names}

    def write(self, encoded: dict[Destination, Encoded]) -> None:
        """Append the tokens of the next batch."""
        for destination, found in encoded.items():
            path = token_file(destination)
            tokens, starts = self._files[path], self._sizes[path]
            starts.write((found.starts + tokens.size // found.tokens.itemsize).tobytes())
            tokens.write(found.tokens.tobytes())
            count = Count(len(found.starts), found.bytes, len(found.tokens))
            self.counts[destination] = self.counts.get(destination, Count()).add(count)
        self.batches += 1
        if self.batches % SHARD == 0:
            self.save()

    @property
    def size(self) -> int:
        """Return the bytes of all files."""
        return sum(file.size for file in self._files.values())

    def save(self) -> None:
        """Flush the files to disk, and say how far they go."""
        for file in self._files.values():
            file.flush()
        said = {
            "characters": token_encoding.BATCH,
            "batches": self.batches,
            "files": {name: [file.size, file.digest] for name, file in self._files.items()},
            "counts": [[*destination, *count] for destination, count in self.counts.items()],
        }
        files.atomic_write(self.folder / PROGRESS, files.with_checksum(said))

    def finish(self) -> None:
        """Flush the files; the work is done."""
        for file in self._files.values():
            file.flush()
        self.discard()

    def discard(self) -> None:
        """Let nothing go on from what is written."""
        for path in (self.folder / PROGRESS, *self.folder.glob(f".{PROGRESS}.*")):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        self._stack.close()


def token_file(destination: Destination) -> str:
    """Return the name of the token file that a destination is in."""
    return VALIDATION if destination.split == "validation" else f"train-{destination.source}.tokens"


class _File:
    """A file that is appended to, with its sha256; what stands in it beyond `size` bytes is cut off."""

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
        while rest:  # a disk that is nearly full takes a part
            rest = rest[self._file.write(rest) :]
        self._sha256.update(data)
        self.size += len(data)

    def flush(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _begun(folder: Path, names: set[str]) -> Begun:
    """Return how far the files of a folder go; those that do not match what is said of them are made again."""
    nothing = Begun(0, {}, {})
    try:
        said = files.read_checksummed((folder / PROGRESS).read_bytes())
        if said["characters"] != token_encoding.BATCH or said["files"].keys() != names:
            return nothing
        if not all(map(_is_count, [said["batches"], *(size for size, _ in said["files"].values())])):
            return nothing
        if any(size > (folder / name).stat().st_size for name, (size, _) in said["files"].items()):
            return nothing
        found = {name: (size, _hash(folder / name, size)) for name, (size, _) in said["files"].items()}
        if any(found[name][1].hexdigest() != digest for name, (_, digest) in said["files"].items()):
            return nothing
        counts = {Destination(source, split): Count(*count) for source, split, *count in said["counts"]}
        if not all(map(_is_count, chain.from_iterable(counts.values()))):
            return nothing
        return Begun(said["batches"], found, counts)
    except (OSError, ValueError, KeyError, TypeError):
        return nothing


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _hash(path: Path, size: int) -> "_Hash":
    """Return the sha256 of the first bytes of a file."""
    digest = sha256()
    with path.open("rb") as file:
        while piece := file.read(min(size, 1 << 20)):
            digest.update(piece)
            size -= len(piece)
    return digest
