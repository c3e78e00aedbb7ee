"""Text -> tokens in parallel: batches of parts of documents are encoded by processes, and come back in order.

A batch depends on nothing but the text, and its tokens on nothing but the batch; so any number of processes gives the
same tokens. The processes are plain children that read batches from a pipe: they need no torch and no second import of
the program that started them, and they end by themselves when it does, however it ends. Nobody but these two writes to
their pipes, so what is unpickled is what the other one has pickled.
"""

import os
import pickle
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from math import ceil
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Literal, NamedTuple

import numpy as np

from lmlong.data.token_file import token_type
from lmlong.data.tokenizers.base import Tokenizer
from lmlong.data.tokenizers.factory import load_tokenizer
from lmlong.errors import LmlongError

BATCH = 1 << 18
"""Characters from which on a batch is full."""

ALONE = 16
"""Batches that are encoded here before other processes are started, which takes a second: few texts are worth that."""


Split = Literal["train", "validation"]


class Destination(NamedTuple):
    """The source and split that tokens belong to."""

    source: int
    split: Split


class Cut(NamedTuple):
    """A part of a document, as `tokenizer.parts` cuts it, that is encoded by itself."""

    text: str
    begins: bool  # the document
    ends: bool


Batch = dict[Destination, list[Cut]]


class Encoded(NamedTuple):
    """The tokens of cuts, with bos and eos."""

    tokens: np.ndarray  # (tokens,) uint16 or uint32
    starts: np.ndarray  # (documents,) int64, positions of those that begin among the tokens
    bytes: int  # of text


def batches_of(cuts: Iterable[tuple[Destination, Cut]]) -> Iterator[Batch]:
    """Put cuts together until a batch is full."""
    batch: Batch = {}
    size = 0
    for destination, cut in cuts:
        batch.setdefault(destination, []).append(cut)
        size += len(cut.text)
        if size >= BATCH:
            yield batch
            batch, size = {}, 0
    if batch:
        yield batch


def encode(batch: Batch, tokenizer: Tokenizer) -> dict[Destination, Encoded]:
    """Return the tokens of a batch."""
    return {destination: _encode(cuts, tokenizer) for destination, cuts in batch.items()}


def _encode(cuts: list[Cut], tokenizer: Tokenizer) -> Encoded:
    tokens: list[int] = []
    starts = []
    for cut, ids in zip(cuts, tokenizer.encode_parts([cut.text for cut in cuts]), strict=True):
        if cut.begins:
            starts.append(len(tokens))
            tokens.append(tokenizer.bos)
        tokens.extend(ids)
        if cut.ends:
            tokens.append(tokenizer.eos)
    array = np.array(tokens, dtype=token_type(tokenizer))
    return Encoded(array, np.array(starts, dtype="<i8"), int(tokenizer.token_bytes[array].sum()))


def cores() -> int:
    """Return how many cores this process may use; a container may be given fewer than the machine has."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return min(allowed, ceil(int(quota) / int(period)))
    except (OSError, ValueError):  # no such limit
        return allowed


def encode_all(
    batches: Iterator[Batch], tokenizer: Tokenizer, file: Path, processes: int
) -> Generator[dict[Destination, Encoded], None, None]:
    """Iterate over the tokens of all batches, in order; `file` is that of the tokenizer."""
    alone = batches if processes == 1 else islice(batches, ALONE)
    yield from (encode(batch, tokenizer) for batch in alone)
    first = next(batches, None)
    if first is not None:
        with _Pool(file, processes) as pool:
            yield from pool.encode(first, batches)


class _Pool:
    """Processes that encode, and a thread for each, which waits for it."""

    def __init__(self, file: Path, processes: int):
        self._threads = ThreadPoolExecutor(processes)
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        self._workers: list[_Worker] = []
        self._window = 2 * processes  # batches that are being encoded or wait for it
        self._file, self._processes = file, processes

    def __enter__(self) -> "_Pool":
        try:
            for _ in range(self._processes):
                worker = _Worker(self._file)
                self._workers.append(worker)
                self._idle.put(worker)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def encode(self, first: Batch, batches: Iterator[Batch]) -> Iterator[dict[Destination, Encoded]]:
        """Iterate over the tokens of batches, in order."""
        waiting: deque[Future[dict[Destination, Encoded]]] = deque([self._threads.submit(self._one, first)])
        for batch in batches:
            waiting.append(self._threads.submit(self._one, batch))
            if len(waiting) == self._window:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def _one(self, batch: Batch) -> dict[Destination, Encoded]:
        worker = self._idle.get()
        try:
            return worker.encode(batch)
        finally:
            self._idle.put(worker)

    def _stop(self) -> None:
        """End all processes; a thread that waits for one then fails, and ends too."""
        for worker in self._workers:
            worker.process.kill()
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.close()


START = "import sys; sys.path[:] = sys.argv[2:]; from lmlong.data.token_encoding import serve; serve(sys.argv[1])"
"""What a process runs: with the modules of the one that started it, wherever that stands."""

QUIET = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Each process computes in one thread, for there are as many as may compute."""


class _Worker:
    """A process that encodes one batch after another."""

    def __init__(self, file: Path):
        self.process = subprocess.Popen(
            [sys.executable, "-c", START, str(file.absolute()), *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **QUIET},
            start_new_session=True,  # Ctrl-C is for the one that started it, and ends it
        )
        assert self.process.stdin and self.process.stdout
        self._to, self._from = self.process.stdin, self.process.stdout

    def encode(self, batch: Batch) -> dict[Destination, Encoded]:
        """Return the tokens of a batch, or raise the error that they led to."""
        try:
            pickle.dump(batch, self._to, pickle.HIGHEST_PROTOCOL)
            self._to.flush()
            result = pickle.load(self._from)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            raise LmlongError(_ended(self.process.wait())) from None
        if isinstance(result, LmlongError):
            raise result
        return result  # type: ignore[no-any-return]

    def close(self) -> None:
        """Wait for the process, which has ended, and close its pipes."""
        self.process.wait()
        self._from.close()
        with suppress(BrokenPipeError):  # what it had not read yet is lost with it
            self._to.close()


def _ended(code: int) -> str:
    """Return why a process ended, and what to do."""
    how = f"ended with exit code {code}"
    if code < 0:
        how = f"was ended by signal {-code} ({signal.Signals(-code).name})"
    often = ", as the system does where memory is short" if code == -signal.SIGKILL else ""
    return (
        f"a process that tokenizes {how}{often}. Give the same command again: it goes on where this one stopped. "
        "Fewer processes (lmlong data prepare --processes 1) take less memory."
    )


def serve(file: str) -> None:
    """Encode batches from standard input to standard output, until there are no more."""
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # so that nothing else is written between the tokens
    tokenizer = load_tokenizer(file)
    try:
        while True:
            try:
                result: dict[Destination, Encoded] | LmlongError = encode(pickle.load(source), tokenizer)
            except LmlongError as error:
                result = error
            pickle.dump(result, sink, pickle.HIGHEST_PROTOCOL)
            sink.flush()
    except (EOFError, BrokenPipeError, pickle.UnpicklingError):  # the process that started this one has ended
        os._exit(0)
