"""Input and output of `lmlong score`."""

import heapq
import io
import json
import math
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lmlong.checkpoint.location import folder_of
from lmlong.cli.stop import Stop
from lmlong.data.encoding import EncodingError
from lmlong.data.formats.table import is_plain, is_utf8, text_file
from lmlong.errors import CheckpointError, UsageError
from lmlong.inference import state_file
from lmlong.inference.loading import TrainedLanguageModel
from lmlong.inference.session import Session
from lmlong.io.incoming_bytes import CHUNK, QUIET, FilePosition, Waiting, follow_file, read_available
from lmlong.io.system_errors import explain_errors
from lmlong.model.precision import Precision
from lmlong.report.progress import Progress
from lmlong.surprisal.figure import SurpriseAlong
from lmlong.surprisal.records import Lines, RecordScore, States
from lmlong.surprisal.robust_score import LEAST
from lmlong.surprisal.saved import SavedRecords, SavedText, save_records
from lmlong.surprisal.stream import TextScore
from lmlong.surprisal.units import Surprise, Totals, Unit

STDIN = Path("-")

BEGINNING = 8192
"""Leading bytes that are checked for binary content."""

SAVED = "score"
"""The key in a state file of what a later run needs to continue the score."""

COLUMNS = ("source", "number", "offset", "bytes", "tokens", "bits", "bits_per_byte", "mean", "z", "text")


class Job(NamedTuple):
    """The inputs and options of the command."""

    trained: TrainedLanguageModel
    inputs: list[Path]
    precision: Precision
    unit: Unit
    keep: int  # bytes of a unit that are printed
    quiet: float | None  # seconds
    follow: bool
    field: str | None
    streams: str | None
    streams_memory: int  # bytes
    most_streams: int
    load_state: Path | None
    save_state: Path | None

    def text_score(self, source: str, totals: Totals | None, session: Session | None = None) -> TextScore:
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
        if self._above is not None and self._highest and _z(self._highest) < self._above:
            print(_nothing_above(self._above, self._highest, unit), file=sys.stderr)
        if plot and self._along:
            from lmlong.report.plot import save

            with explain_errors(plot):
                save(self._along.figure(folder_of(run).name), plot)

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
    """Score all inputs and write the units; a signal ends it after all that was read is scored and saved. Return the
    exit code."""
    stop = Stop()
    with stop:
        if job.unit == "record":
            _score_records(job, show, stop)
        else:
            _score_texts(job, show, stop)
    return 0 if stop.received is None else 128 + stop.received


def _score_texts(job: Job, show: Show, stop: Stop) -> None:
    totals, not_read = Totals(), 0
    for path in job.inputs:
        position, text = FilePosition(), job.text_score(str(path), totals)
        if job.load_state:
            text, position = _restored(job, job.load_state, str(path))
        with _opened(path, job, stop, position) as chunks:
            for data in stop.until(chunks):
                show.write(text.settle() if data == QUIET else text.read(data))
            if job.save_state is None:
                show.write(text.finish())
        totals, not_read = text.totals, not_read + text.not_read
        if job.save_state:
            _save(job, text, position, job.save_state)
    note = f"{not_read:,} bytes are not UTF-8 or have no token: read as U+FFFD, or left out"
    _report(job, totals, [note] if not_read else [])


def _score_records(job: Job, show: Show, stop: Stop) -> None:
    totals, position, lines = Totals(), FilePosition(), Lines()
    with ExitStack() as stack:
        saved = None
        if job.load_state:
            saved = SavedRecords(job.load_state, job.trained.owners, str(job.trained.checkpoint))
            stack.callback(saved.close)
            totals, position = _restored_records(saved, job, lines)
        states = None
        if job.streams:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lmlong-streams-")))
            states = States(job.trained, folder, job.streams_memory, job.most_streams, saved)
        records = RecordScore(job.trained, totals, job.keep, job.field, job.streams, states, job.precision)
        for path in job.inputs:
            with _opened(path, job, stop, position) as chunks:
                for data in stop.until(chunks):
                    for line in lines.read(data):
                        show.write(records.read(line, str(path)))
                for line in () if job.save_state else lines.finish():
                    show.write(records.read(line, str(path)))
            if not job.save_state:
                position, lines = FilePosition(), Lines()
        if job.save_state:
            about = _about_records(job, position, lines, totals)
            save_records(job.save_state, about, states.files() if states else ())
    notes = [f"skipped {count:,} records: {reason}" for reason, count in records.skipped.items()]
    if states and states.forgotten:
        notes.append(f"{states.forgotten:,} streams were dropped, the least recently used: raise --most-streams")
    _report(job, totals, notes)


@contextmanager
def _opened(path: Path, job: Job, stop: Stop, position: FilePosition) -> Iterator[Iterator[bytes]]:
    """Open an input, and yield its bytes in UTF-8: of a stream as they arrive, of a file from `position`, which is set
    to where reading ended."""
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


def _restored(job: Job, path: Path, source: str) -> tuple[TextScore, FilePosition]:
    """Return the score of a text, resumed from a state file, and how far its file was read."""
    session, saved = job.trained.load_state(path), state_file.describe(path).get(SAVED)
    if saved is None:  # written by `lmlong state build`
        return job.text_score(source, None, session), FilePosition()
    try:
        SavedText.model_validate(saved)
        position = FilePosition(**saved["file"])
        text = job.text_score(source, Totals.from_json(saved["totals"]), session)
        text.restore(saved)
    except ValueError:
        raise CheckpointError(f"{path}: its saved score is not valid. Score the text again.") from None
    if saved["by"] != job.unit:
        raise UsageError(f"{path}: holds a score by {saved['by']}. Give --by {saved['by']}, or score the text again.")
    return text, position


def _save(job: Job, text: TextScore, position: FilePosition, path: Path) -> None:
    trained, saved = job.trained, {SAVED: {**text.to_json(), "by": job.unit, "file": asdict(position)}}
    owners = (trained.owners, trained.tokenizer, str(trained.checkpoint))
    state_file.save(path, text.session, trained.model, *owners, saved)


def _restored_records(saved: SavedRecords, job: Job, lines: Lines) -> tuple[Totals, FilePosition]:
    """Resume the score of records: return their totals, and how far their file was read."""
    for name, given in (("field", job.field), ("streams", job.streams)):
        if (before := saved.about.get(name)) != given:
            remedy = f"Give --{name} {before}" if before else f"Leave --{name} out"
            raise UsageError(f"{saved.path}: holds records scored with --{name} {before or '(none)'}. {remedy}.")
    lines.restore(saved.about["lines"])
    return Totals.from_json(saved.about["totals"]), FilePosition(**saved.about["file"])


def _about_records(job: Job, position: FilePosition, lines: Lines, totals: Totals) -> dict[str, Any]:
    """Return all that `_restored_records` needs."""
    return {
        **job.trained.owners,
        "run": str(job.trained.checkpoint),
        "field": job.field,
        "streams": job.streams,
        "file": asdict(position),
        "lines": lines.to_json(),
        "totals": totals.to_json(),
    }


def _report(job: Job, totals: Totals, notes: list[str]) -> None:
    """Print to standard error how much was read, and in which number format."""
    bits = f", {totals.bits / totals.bytes:.3f} bits per byte" if totals.bytes else ""
    bits += f", precision {job.precision}"
    for line in (f"{totals.bytes:,} bytes, {totals.tokens:,} tokens{bits}", *notes):
        print(line, file=sys.stderr)
    if not totals.bytes:
        print("no text was scored", file=sys.stderr)
