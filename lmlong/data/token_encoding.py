"""Encode text in parallel: child processes encode batches of document parts, which are returned in order.

A batch depends only on the text, and its tokens only on the batch, so any number of processes gives the same tokens.
The children read batches from a pipe. They import neither torch nor the parent's main module, and end when the parent
ends, even after a crash. Only parent and child write to their pipes, so unpickling is safe.
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
from itertools import chain, islice
from math import ceil
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np

from lmlong.data.split import Split
from lmlong.data.token_file import token_type
from lmlong.data.tokenizers import load_tokenizer
from lmlong.data.tokenizers.base import Tokenizer
from lmlong.errors import LmlongError

BATCH = 1 << 18
"""Characters from which a batch is full."""

ALONE = 16
"""Batches that are encoded in this process before children are started. Starting them takes a second, which short texts
are not worth."""


class Destination(NamedTuple):
    """The source and split that tokens belong to."""

    source: int
    split: Split


class Cut(NamedTuple):
    """A part of a document, cut by `tokenizer.parts`, that is encoded separately."""

    text: str
    begins: bool  # whether it is the first part of the document
    ends: bool  # whether it is the last


Batch = dict[Destination, list[Cut]]


class Encoded(NamedTuple):
    """The tokens of cuts, with bos and eos."""

    tokens: np.ndarray  # (tokens,) uint16 or uint32
    starts: np.ndarray  # (documents,) int64, positions at which documents begin
    bytes: int  # of text


def batches_of(cuts: Iterable[tuple[Destination, Cut]]) -> Iterator[Batch]:
    """Group cuts into full batches."""
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
    encoded = {}
    for destination, cuts in batch.items():
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
        size = int(tokenizer.token_bytes[array].sum())
        encoded[destination] = Encoded(array, np.array(starts, dtype="<i8"), size)
    return encoded


def cores() -> int:
    """Return how many cores this process may use. A container may have fewer than the machine."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return min(allowed, ceil(int(quota) / int(period)))
    except (OSError, ValueError):  # no limit
        return allowed


def encode_all(
    batches: Iterator[Batch], tokenizer: Tokenizer, file: Path, processes: int
) -> Generator[dict[Destination, Encoded], None, None]:
    """Yield the tokens of all batches, in order. `file`: the file of the tokenizer."""
    alone = batches if processes == 1 else islice(batches, ALONE)
    yield from (encode(batch, tokenizer) for batch in alone)
    first = next(batches, None)
    if first is not None:
        yield from _encode_in_children(chain([first], batches), file, processes)


def _encode_in_children(batches: Iterator[Batch], file: Path, processes: int) -> Iterator[dict[Destination, Encoded]]:
    """Yield the tokens of batches, in order, encoded by child processes. A thread for each waits for it."""
    threads = ThreadPoolExecutor(processes)
    workers: list[_Worker] = []
    idle: SimpleQueue[_Worker] = SimpleQueue()

    def encode_one(batch: Batch) -> dict[Destination, Encoded]:
        worker = idle.get()
        try:
            return worker.encode(batch)
        finally:
            idle.put(worker)

    try:
        for _ in range(processes):
            workers.append(_Worker(file))
            idle.put(workers[-1])
        waiting: deque[Future[dict[Destination, Encoded]]] = deque()
        for batch in batches:
            waiting.append(threads.submit(encode_one, batch))
            if len(waiting) == 2 * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for worker in workers:
            worker.process.kill()  # a thread that waits for it then fails and ends
        threads.shutdown(cancel_futures=True)
        for worker in workers:
            worker.close()


START = "import sys; sys.path[:] = sys.argv[2:]; from lmlong.data.token_encoding import serve; serve(sys.argv[1])"
"""Code of a child: it runs with the parent's `sys.path`."""

QUIET = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Environment of a child: one thread each, since there is a child for each core."""


class _Worker:
    """A process that encodes one batch after another."""

    def __init__(self, file: Path):
        self.process = subprocess.Popen(
            [sys.executable, "-c", START, str(file.absolute()), *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **QUIET},
            start_new_session=True,  # Ctrl-C goes only to the parent, which ends the child
        )
        assert self.process.stdin and self.process.stdout
        self._to, self._from = self.process.stdin, self.process.stdout

    def encode(self, batch: Batch) -> dict[Destination, Encoded]:
        """Return the tokens of a batch, or raise the error of its encoding."""
        try:
            pickle.dump(batch, self._to, pickle.HIGHEST_PROTOCOL)
            self._to.flush()
            result = pickle.load(self._from)  # from a child of this process, by a pipe that only both have
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            raise LmlongError(_ended(self.process.wait())) from None
        if isinstance(result, LmlongError):
            raise result
        return result  # type: ignore[no-any-return]

    def close(self) -> None:
        """Reap the killed process, and close its pipes."""
        self.process.wait()
        self._from.close()
        with suppress(BrokenPipeError):  # unread data is lost
            self._to.close()


def _ended(code: int) -> str:
    """Return why a process ended, and what to do."""
    how = f"ended with exit code {code}"
    if code < 0:
        how = f"was ended by signal {-code} ({signal.Signals(-code).name})"
    often = ", often because the system is out of memory" if code == -signal.SIGKILL else ""
    return (
        f"a tokenizing process {how}{often}. Run the same command again: it resumes where this one stopped. "
        "Fewer processes (lmlong data prepare --processes 1) take less memory."
    )


def serve(file: str) -> None:
    """Encode batches from standard input to standard output until the input ends."""
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # other output goes to standard error
    tokenizer = load_tokenizer(file)
    try:
        while True:
            try:
                result: dict[Destination, Encoded] | LmlongError = encode(pickle.load(source), tokenizer)
            except LmlongError as error:
                result = error
            pickle.dump(result, sink, pickle.HIGHEST_PROTOCOL)
            sink.flush()
    except (EOFError, BrokenPipeError, pickle.UnpicklingError):  # the parent has ended
        os._exit(0)
