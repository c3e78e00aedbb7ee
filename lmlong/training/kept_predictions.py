"""Predictions of a teacher that are computed once, and kept in a file.

The file is in the cache, one for each teacher, temperature and number of tokens kept, so all runs with this teacher
share it. A line of JSON describes it. A record follows for each row of text that the teacher has read: the key of the
row, its length, the most probable tokens of each position, their log probabilities, and a digest. A record that was cut
off by a crash is removed, and a damaged one is computed again.

T time, K most probable tokens.
"""

import json
import os
import struct
from collections.abc import Iterable
from contextlib import AbstractContextManager
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lmlong import recipe
from lmlong.checkpoint import read
from lmlong.data.tokenizers.base import Tokenizer
from lmlong.errors import CheckpointError
from lmlong.io.cache import cache_folder, check_home, key_of
from lmlong.io.lock import lock
from lmlong.model.kept_output import KeptOutput, most_probable
from lmlong.model.loss import Softening
from lmlong.report.progress import Progress
from lmlong.training.distillation import Teacher, load_teacher

FORMAT, VERSION = "lmlong kept predictions", 1

KEY, DIGEST = 16, 32
"""Bytes of the key and of the digest of a record."""

LENGTH = struct.Struct("<q")

AHEAD = 1 << 16
"""Tokens of the next batches whose predictions are computed when those of a batch are missing."""

LONGEST_HEADER = 1000
"""Bytes."""


class Row(NamedTuple):
    """The kept predictions of a row."""

    tokens: Tensor  # (T, K) int64
    log_q: Tensor  # (T, K + 1) float32: of these tokens, and of all others together


class KeptFile:
    """A file of kept predictions. Only rows that are asked for are read."""

    def __init__(self, path: Path, about: dict[str, Any]):
        self.path, self.kept, self.vocabulary = path, about["kept"], about["vocabulary"]
        self._header = json.dumps({"format": FORMAT, "version": VERSION, **about}).encode() + b"\n"
        self._offsets: dict[bytes, int] = {}
        self._end = 0  # of the records that are known

    def row(self, key: bytes, time: int) -> Row | None:
        """Return the predictions of a row of `time` tokens; None if they are not in the file, or damaged."""
        offset = self._offsets.get(key)
        if offset is None:
            return None
        with self.path.open("rb") as file:
            file.seek(offset)
            record = file.read(self._size(time))
        body, digest = record[:-DIGEST], record[-DIGEST:]
        if len(record) < self._size(time) or sha256(body).digest() != digest:
            return None
        if body[: KEY + LENGTH.size] != key + LENGTH.pack(time):
            return None
        numbers = memoryview(body)[KEY + LENGTH.size :]
        tokens = np.frombuffer(numbers, "<i4", time * self.kept).reshape(time, self.kept)
        log_q = np.frombuffer(numbers, "<f4", offset=tokens.nbytes).reshape(time, self.kept + 1)
        if tokens.size and not (tokens.min() >= 0 and tokens.max() < self.vocabulary and (log_q <= 1e-3).all()):
            return None
        return Row(torch.from_numpy(tokens.astype(np.int64)), torch.from_numpy(log_q.astype(np.float32)))

    def add(self, rows: Iterable[tuple[bytes, Row]]) -> None:
        """Append the predictions of rows by their keys; the caller has locked the file."""
        with self.path.open("r+b") as file:
            file.seek(self._end)
            for key, row in rows:
                tokens, log_q = row.tokens.numpy().astype("<i4"), row.log_q.numpy().astype("<f4")
                body = key + LENGTH.pack(len(tokens)) + tokens.tobytes() + log_q.tobytes()
                self._offsets[key] = self._end
                self._end += file.write(body + sha256(body).digest())
            file.flush()
            os.fsync(file.fileno())

    def locked(self) -> AbstractContextManager[bool]:
        """Return a lock of the file against other processes that add rows."""
        return lock(self.path.with_suffix(".lock"), waiting=f"{self.path}: another run is adding predictions")

    def update(self, is_locked: bool = False) -> None:
        """Find the records that were added since the last call. With a lock, create the file if it is missing or of
        another format, and remove a record at its end that is not whole."""
        size = self.path.stat().st_size if self.path.exists() else 0
        if not self._end:
            if size and self._begins_with_header():
                self._end = len(self._header)
            elif is_locked:
                self.path.write_bytes(self._header)
                self._end = size = len(self._header)
            else:
                return
        with self.path.open("rb") as file:
            while self._end + KEY + LENGTH.size <= size:
                file.seek(self._end)
                key, (time,) = file.read(KEY), LENGTH.unpack(file.read(LENGTH.size))
                if time < 0 or self._end + self._size(time) > size:
                    break
                self._offsets[key] = self._end
                self._end += self._size(time)
        if is_locked and self._end < size:
            os.truncate(self.path, self._end)

    def _begins_with_header(self) -> bool:
        with self.path.open("rb") as file:
            return file.readline(LONGEST_HEADER) == self._header

    def _size(self, time: int) -> int:
        """Return the bytes of a record of `time` tokens."""
        return KEY + LENGTH.size + time * 4 * (2 * self.kept + 1) + DIGEST


class KeptTeacher:
    """A teacher of which only kept predictions are in memory. It is loaded to compute those that are missing."""

    def __init__(self, options: recipe.Training, tokenizer: Tokenizer, weights_hash: str):
        assert options.teacher is not None and options.keep_predictions is not None
        self._options, self.tokenizer, self.weights_hash = options, tokenizer, weights_hash
        self.soft = Softening(options.teacher_share, options.teacher_temperature)
        kept = min(options.keep_predictions, tokenizer.vocabulary)
        about = {
            "teacher": weights_hash,
            "temperature": options.teacher_temperature,
            "kept": kept,
            "vocabulary": tokenizer.vocabulary,
        }
        folder = cache_folder() / "predictions"
        check_home(folder, "the cache")
        self.file = KeptFile(folder / f"{key_of(FORMAT, VERSION, *about.values())}.predictions", about)
        self.file.update()

    def output(self, tokens: Tensor, document_starts: Tensor) -> KeptOutput:
        """Return the predictions for a batch, for which `prepare` was called."""
        rows = [self.file.row(key, tokens.shape[1]) for key in map(_key, tokens, document_starts)]
        found = [row for row in rows if row is not None]
        if len(found) < len(rows):
            raise CheckpointError(f"{self.file.path}: damaged while it is used. Remove it, and resume the run.")
        kept, log_q = (torch.stack(parts).to(tokens.device) for parts in zip(*found, strict=True))
        return KeptOutput(kept, log_q, self.soft)

    def prepare(self, tokens: Tensor, document_starts: Tensor, ahead: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Compute what is missing of the predictions for a batch (B, T). If anything is, that of the next batches too:
        `ahead` are the batches from this one on, of which up to AHEAD tokens are read."""
        if not self._missing(tokens, document_starts):
            return
        self.file.path.parent.mkdir(parents=True, exist_ok=True)
        with self.file.locked():
            self.file.update(is_locked=True)
            missing: dict[bytes, tuple[Tensor, Tensor]] = {}
            read_tokens = 0
            for batch in ahead:
                missing |= self._missing(*batch)
                read_tokens += batch[0].numel()
                if read_tokens >= AHEAD:
                    break
            if missing:
                self._compute(missing, tokens.device)

    def _missing(self, tokens: Tensor, document_starts: Tensor) -> dict[bytes, tuple[Tensor, Tensor]]:
        """Return the rows of a batch whose predictions are not kept, by their keys."""
        keyed = {_key(*row): row for row in zip(tokens, document_starts, strict=True)}
        return {key: row for key, row in keyed.items() if self.file.row(key, len(row[0])) is None}

    def _compute(self, rows: dict[bytes, tuple[Tensor, Tensor]], device: torch.device) -> None:
        teacher = load_teacher(self._options)
        assert isinstance(teacher, Teacher)
        if teacher.weights_hash != self.weights_hash:
            raise CheckpointError(f"training.teacher: {self._options.teacher} has changed. Start a new run.")
        teacher.model.to(device)
        with Progress("computing predictions of the teacher", len(rows), "rows") as progress:
            for key, (tokens, starts) in rows.items():
                self.file.add([(key, _predict(teacher, tokens.to(device), starts.to(device), self.file.kept))])
                progress.update()


class DrawnTeacher:
    """Random predictions in place of kept ones, to profile a step on random text."""

    def __init__(self, teacher: KeptTeacher):
        self.tokenizer, self.weights_hash, self._teacher = teacher.tokenizer, teacher.weights_hash, teacher

    def output(self, tokens: Tensor, document_starts: Tensor) -> KeptOutput:
        """Return predictions of the shape of those for a batch."""
        file = self._teacher.file
        kept = torch.arange(file.kept, device=tokens.device).expand(*tokens.shape, -1)
        log_q = torch.zeros(*tokens.shape, file.kept + 1, device=tokens.device).log_softmax(-1)
        return KeptOutput(kept, log_q, self._teacher.soft)


def _predict(teacher: Teacher, tokens: Tensor, document_starts: Tensor, kept: int) -> Row:
    """Return the predictions of a teacher for a row (T,)."""
    hidden = teacher.hidden_states(tokens[None], document_starts[None])[0]
    assert teacher.soft is not None
    pieces = []
    for piece in hidden.split(64):
        logits = teacher.model.lm_head(piece) / teacher.soft.temperature
        pieces.append(most_probable(logits.log_softmax(-1), kept))
    most, log_q = (torch.cat(parts).cpu() for parts in zip(*pieces, strict=True))
    return Row(most, log_q.float())


def _key(tokens: Tensor, document_starts: Tensor) -> bytes:
    """Return the key of a row: a hash of what the teacher reads. It always begins with an empty state, whether or not a
    document starts there."""
    content = tokens.cpu().numpy().astype("<i8").tobytes() + document_starts[1:].cpu().numpy().tobytes()
    return sha256(content).digest()[:KEY]


def open_kept(options: recipe.Training) -> KeptTeacher:
    """Return the teacher that a recipe names, by its kept predictions, without its weights."""
    assert options.teacher is not None

    def opened(checkpoint: Path) -> KeptTeacher:
        weights_hash = read.manifest.read(checkpoint).files[read.WEIGHTS]["sha256"]
        return KeptTeacher(options, read.read_tokenizer(checkpoint), weights_hash)

    return read.reading(options.teacher, opened)
