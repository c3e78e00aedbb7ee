"""Input and output of `lmlong score`."""

import heapq
import io
import json
import math
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lmlong.checkpoint.location import folder_of
from lmlong.cli.output import draw
from lmlong.cli.stop import Stop
from lmlong.data.encoding import EncodingError
from lmlong.data.formats.table import is_plain, is_utf8, text_file
from lmlong.errors import CheckpointError, UsageError
from lmlong.inference import state_file
from lmlong.inference.loading import TrainedLanguageModel
from lmlong.inference.session import Session
from lmlong.io.incoming_bytes import CHUNK, QUIET, FilePosition, Waiting, follow_file, read_available
from lmlong.io.system_errors import explain_errors
from lmlong.model.device import Precision
from lmlong.report.progress import Progress
from lmlong.surprisal.figure import SurpriseAlong
from lmlong.surprisal.records import RecordScore
from lmlong.surprisal.robust_score import LEAST
from lmlong.surprisal.saved import check_saved
from lmlong.surprisal.stream import TextScore
from lmlong.surprisal.units import Surprise, Totals, Unit

STDIN = Path("-")

BEGINNING = 8192
"""Leading bytes that are checked for binary content."""

SAVED = "score"
"""The key in a state file of what a later run needs to continue the score."""

COLUMNS = ("source", "number", "offset", "bytes", "tokens", "bits", "bits_per_byte", "mean", "z", "text")


class Job(NamedTuple):
    """The input and options of the command."""

    trained: TrainedLanguageModel
    file: Path
    precision: Precision
    unit: Unit
    keep: int  # bytes of a unit that are printed
    quiet: float | None  # seconds
    follow: bool
    field: str | None
    load_state: Path | None
    save_state: Path | None

    def begin(self, session: Session | None = None, totals: Totals | None = None) -> TextScore | RecordScore:
        """Return a score of the input; of a text, after the session."""
        source = str(self.file)
        if self.unit == "record":
            return RecordScore(self.trained, source, totals, self.keep, self.field, self.precision)
        return TextScore(self.trained, self.unit, source, totals, session, self.keep, self.precision)


class Show:
    """Writes units to standard output as they are scored, or in the end those with the highest z."""

    def __init__(self, form: Literal["json", "tsv", "text"], above: float | None, top: int | None, plot: bool):
        self._form, self._above, self._top = form, above, top
        self._best: list[tuple[float, int, Surprise]] = []  # a heap of z, minus how many came before, and the unit
        self._written = 0
        self._along = SurpriseAlong() if plot else None
        self._highest: Surprise | None = None
        if form == "tsv":
            print("\t".join(COLUMNS), flush=True)

    def write(self, units: Iterator[Surprise]) -> None:
        """Write all units, or those that are unusual enough, and flush."""
        for unit in units:
            if self._along:
                self._along.add(unit)
            if self._highest is None or _z(unit) > _z(self._highest):
                self._highest = unit
            if self._above is None or _z(unit) >= self._above:
                self._show(unit)
        sys.stdout.flush()

    def _show(self, unit: Surprise) -> None:
        if self._top is None:
            sys.stdout.write(self._line(unit) + "\n")
            return
        self._written += 1
        if unit.z is not None:
            add = heapq.heappush if len(self._best) < self._top else heapq.heappushpop
            add(self._best, (unit.z, -self._written, unit))

    def finish(self, plot: Path | None, run: str, unit: Unit) -> None:
        """Write the units with the highest z, draw the plot, and report on standard error if `above` has hidden all."""
        for *_, best in sorted(self._best, reverse=True):
            print(self._line(best), flush=True)
        if self._written and not self._best:
            print(f"no {unit} has a z to compare: the first {LEAST} have none", file=sys.stderr)
        if self._above is not None and self._highest and _z(self._highest) < self._above:
            print(_nothing_above(self._above, self._highest, unit), file=sys.stderr)
        if plot and self._along:
            draw(self._along.figure(folder_of(run).name), plot)

    def _line(self, unit: Surprise) -> str:
        if self._form == "text":
            return unit.text.removesuffix("\n")
        values = _values(unit)
        if self._form == "json":
            return json.dumps(values)
        values["text"] = json.dumps(unit.text)[1:-1]
        return "\t".join("" if value is None else str(value) for value in values.values())


def _z(unit: Surprise) -> float:
    """Return the z of a unit; those without one are below all others."""
    return -math.inf if unit.z is None else unit.z


def _nothing_above(above: float, highest: Surprise, unit: Unit) -> str:
    if highest.z is None:
        return f"no {unit} has z of at least {above:g}: the first {LEAST} have none"
    where = f"{unit} {highest.number:,} of {highest.source}"
    return f"no {unit} has z of at least {above:g}; the highest is {highest.z:.4g}, of {where}"


def _values(unit: Surprise) -> dict[str, Any]:
    """Return the printed values of a unit."""
    rounded = {"bits": unit.bits, "bits_per_byte": unit.bits_per_byte, "mean": unit.mean, "z": unit.z}
    numbers = {name: value if value is None else round(value, 6) for name, value in rounded.items()}
    return {name: numbers[name] if name in numbers else getattr(unit, name) for name in COLUMNS}


def run_job(job: Job, show: Show) -> int:
    """Score the input and write the units; a signal ends it after all that was read is scored and saved. Return the
    exit code."""
    stop = Stop()
    with stop:
        score, position = _restored(job, job.load_state) if job.load_state else (job.begin(), FilePosition())
        with _opened(job, stop, position) as chunks:
            for data in stop.until(chunks):
                show.write(score.settle() if data == QUIET else score.read(data))
            if job.save_state is None:
                show.write(score.finish())
        if job.save_state:
            _save(job, score, position, job.save_state)
        _report(job, score.totals, score.notes)
    return 0 if stop.received is None else 128 + stop.received


@contextmanager
def _opened(job: Job, stop: Stop, position: FilePosition) -> Iterator[Iterator[bytes]]:
    """Open the input, and yield its bytes in UTF-8: of a stream as they arrive, of a file from `position`, which is set
    to where reading ended."""
    path = job.file
    if path == STDIN:
        yield _text_alone(_standard_input(job.quiet, stop.waiting), "standard input")
        return
    if path.is_file() and (text := _converted(path, job)) is not None:
        yield text
        return
    if job.follow:
        with closing(follow_file(path, job.quiet, waiting=stop.waiting, position=position)) as chunks:
            yield _text_alone(chunks, str(path))
        return
    with explain_errors(path):
        file = path.open("rb", buffering=0)
    with file:
        position.seek(file)
        size = path.stat().st_size - file.tell()
        yield _text_alone(_shown(read_available(file.fileno(), None, stop.waiting), path, size), str(path))
        position.note(file)


def _shown(chunks: Iterator[bytes], path: Path, size: int) -> Iterator[bytes]:
    """Yield the bytes of a file, and show how many were read unless units are printed on a terminal."""
    if sys.stdout.isatty() or not path.is_file():
        yield from chunks
        return
    with Progress(f"scoring {path.name}", size) as progress:
        for data in chunks:
            yield data
            progress.update(len(data))


def _converted(path: Path, job: Job) -> Iterator[bytes] | None:
    """Return the text of a file that must be converted, such as a document, in UTF-8; None for a plain text file."""
    resumes = job.follow or job.load_state or job.save_state
    if resumes and is_plain(path):
        return None
    try:
        document = text_file(path)
    except EncodingError:  # bytes that are not UTF-8 are scored as U+FFFD, and counted
        return None
    if is_utf8(path, document):
        return None
    if resumes:
        raise UsageError(
            f"{path}: is converted to text as a whole, and --follow, --load-state and --save-state are for a file that "
            "grows. Leave them out, or convert it: lmlong data show --all FILE > FILE.txt."
        )
    return (piece.encode() for piece in document.pieces())


def _text_alone(chunks: Iterator[bytes], name: str) -> Iterator[bytes]:
    """Yield the input; raise a UsageError if it is binary, with a NUL among its first bytes. A later NUL is allowed:
    logs that were truncated in place have such holes."""
    read = 0
    for data in chunks:
        beginning = data[: max(0, BEGINNING - read)]
        if (offset := beginning.find(b"\0")) >= 0:
            raise UsageError(
                f"{name}: byte {read + offset} is NUL, so the input is not UTF-8 text. Give a document or compressed "
                "file its usual suffix, or convert it to UTF-8."
            )
        read += len(data)
        yield data


def _standard_input(quiet: float | None, waiting: Waiting) -> Iterator[bytes]:
    try:
        return read_available(sys.stdin.fileno(), quiet, waiting)
    except io.UnsupportedOperation:  # a test or a notebook has replaced standard input
        return iter(lambda: sys.stdin.buffer.read(CHUNK), b"")


def _restored(job: Job, path: Path) -> tuple[TextScore | RecordScore, FilePosition]:
    """Return the score in a state file, and how far its input was read."""
    session, saved = job.trained.load_state(path), state_file.describe(path).get(SAVED)
    if saved is None:  # written by `lmlong state build`
        if job.unit == "record":
            raise UsageError(f"{path}: holds no score of records. Leave --load-state out, or give --by line.")
        return job.begin(session), FilePosition()
    try:
        check_saved(saved)
        score, position = job.begin(session, Totals.from_json(saved["totals"])), FilePosition(**saved["file"])
        if saved["by"] == job.unit:
            score.restore(saved)
    except ValueError:
        raise CheckpointError(f"{path}: its saved score is not valid. Score the text again.") from None
    if saved["by"] != job.unit:
        raise UsageError(f"{path}: holds a score by {saved['by']}. Give --by {saved['by']}, or score the text again.")
    if (field := saved.get("field")) != job.field:
        remedy = f"Give --field {field}" if field else "Leave --field out"
        raise UsageError(f"{path}: holds records scored with --field {field or '(none)'}. {remedy}.")
    return score, position


def _save(job: Job, score: TextScore | RecordScore, position: FilePosition, path: Path) -> None:
    trained, saved = job.trained, {SAVED: {**score.to_json(), "by": job.unit, "file": asdict(position)}}
    owners = (trained.owners, trained.tokenizer, str(trained.checkpoint))
    state_file.save(path, score.session, trained.model, *owners, saved)


def _report(job: Job, totals: Totals, notes: list[str]) -> None:
    """Print to standard error how much was read, and in which number format."""
    bits = f", {totals.bits / totals.bytes:.3f} bits per byte" if totals.bytes else ""
    bits += f", precision {job.precision}"
    for line in (f"{totals.bytes:,} bytes, {totals.tokens:,} tokens{bits}", *notes):
        print(line, file=sys.stderr)
    if not totals.bytes:
        print("no text was scored", file=sys.stderr)
