"""Input and output of `lmlong score`."""

import io
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lmlong.cli.stop import Stop
from lmlong.data.encoding import EncodingError
from lmlong.data.text_file import is_plain, is_utf8, text_file
from lmlong.errors import CheckpointError, UsageError
from lmlong.inference import state_file
from lmlong.inference.loading import TrainedLanguageModel
from lmlong.io.arriving import CHUNK, QUIET, Place, Waiting, arriving, follow
from lmlong.io.system_errors import named
from lmlong.model.precision import Precision
from lmlong.surprisal import records_file
from lmlong.surprisal.figure import SurpriseAlong
from lmlong.surprisal.records import Lines, RecordScore, States
from lmlong.surprisal.records_file import SavedRecords
from lmlong.surprisal.saved import SavedText
from lmlong.surprisal.stream import TextScore
from lmlong.surprisal.units import Surprise, Totals, Unit

STDIN = Path("-")

BEGINNING = 8192
"""Leading bytes that are checked for binary content."""

SAVED = "score"
"""The name in a state file of what a score goes on with."""

COLUMNS = ("source", "number", "offset", "bytes", "tokens", "bits", "bits_per_byte", "mean", "z", "text")


class Job(NamedTuple):
    """What is scored, and how."""

    trained: TrainedLanguageModel
    inputs: list[Path]
    unit: Unit
    keep: int  # bytes of a unit that are told
    quiet: float | None  # seconds
    follow: bool
    field: str | None
    streams: str | None
    streams_memory: int  # bytes
    most_streams: int
    load_state: Path | None
    save_state: Path | None
    precision: Precision


class Show:
    """Writes units to standard output as they come."""

    def __init__(self, form: Literal["json", "tsv", "text"], above: float | None, plot: bool):
        self._form, self._above = form, above
        self._along = SurpriseAlong() if plot else None
        if form == "tsv":
            print("\t".join(COLUMNS), flush=True)

    def write(self, units: Iterator[Surprise]) -> None:
        """Write all units, or those that are unusual enough, and let the reader have them."""
        for unit in units:
            if self._along:
                self._along.add(unit)
            if self._above is None or (unit.z is not None and unit.z >= self._above):
                sys.stdout.write(self._line(unit) + "\n")
        sys.stdout.flush()

    def finish(self, plot: Path | None, run: str) -> None:
        if plot and self._along:
            from lmlong.report.plot import save

            with named(plot):
                save(self._along.figure(Path(run).name), plot)

    def _line(self, unit: Surprise) -> str:
        if self._form == "text":
            return unit.text.removesuffix("\n")
        values = _values(unit)
        if self._form == "json":
            return json.dumps(values)
        values["text"] = json.dumps(unit.text)[1:-1]
        return "\t".join("" if value is None else str(value) for value in values.values())


def _values(unit: Surprise) -> dict[str, Any]:
    """Return what is told of a unit."""
    rounded = {"bits": unit.bits, "bits_per_byte": unit.bits_per_byte, "mean": unit.mean, "z": unit.z}
    numbers = {name: value if value is None else round(value, 6) for name, value in rounded.items()}
    return {name: numbers[name] if name in numbers else getattr(unit, name) for name in COLUMNS}


def run_job(job: Job, show: Show) -> int:
    """Score all inputs and write what is found; a signal ends it after what was read, saved. Return the exit code."""
    with Stop() as stop:
        if job.unit == "record":
            _score_records(job, show, stop)
        else:
            _score_texts(job, show, stop)
    return 0 if stop.received is None else 128 + stop.received


def _score_texts(job: Job, show: Show, stop: Stop) -> None:
    totals, not_read = Totals(), 0
    for path in job.inputs:
        place, text = Place(), TextScore(job.trained, job.unit, str(path), totals, None, job.keep, job.precision)
        if job.load_state:
            text, place = _restored(job, job.load_state, str(path))
        with _opened(path, job, stop, place) as arrived:
            for data in stop.until(arrived):
                show.write(text.settle() if data == QUIET else text.read(data))
            if job.save_state is None:
                show.write(text.finish())
        totals, not_read = text.totals, not_read + text.not_read
        if job.save_state:
            _save(job, text, place, job.save_state)
    more = f"{not_read:,} bytes are no UTF-8 or have no token: read as U+FFFD, or not at all"
    _tell(job, totals, [more] if not_read else [])


def _score_records(job: Job, show: Show, stop: Stop) -> None:
    totals, place, lines = Totals(), Place(), Lines()
    with ExitStack() as stack:
        saved = None
        if job.load_state:
            saved = stack.enter_context(closing(_saved_records(job, job.load_state)))
            totals, place = _restored_records(saved, job, lines)
        states = None
        if job.streams:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lmlong-streams-")))
            states = States(job.trained, folder, job.streams_memory, job.most_streams, saved)
        records = RecordScore(job.trained, totals, job.keep, job.field, job.streams, states, job.precision)
        for path in job.inputs:
            with _opened(path, job, stop, place) as arrived:
                for data in stop.until(arrived):
                    for line in lines.read(data):
                        show.write(records.read(line, str(path)))
                for line in () if job.save_state else lines.finish():
                    show.write(records.read(line, str(path)))
            if not job.save_state:
                place, lines = Place(), Lines()
        if job.save_state:
            about = _about_records(job, place, lines, totals)
            records_file.save(job.save_state, about, states.files() if states else ())
    told = [f"skipped {count:,} records: {reason}" for reason, count in records.skipped.items()]
    if states and states.forgotten:
        told.append(f"{states.forgotten:,} streams were forgotten, those not used for longest: raise --most-streams")
    _tell(job, totals, told)


@contextmanager
def _opened(path: Path, job: Job, stop: Stop, place: Place) -> Iterator[Iterator[bytes]]:
    """Open an input, and yield its bytes in UTF-8: a stream as they arrive, a file from `place` on, which is set to
    where it ended."""
    if path == STDIN:
        yield _text_alone(_standard_input(job.quiet, stop.waiting), "standard input")
        return
    if path.is_file() and (text := _converted(path, job)) is not None:
        yield text
        return
    if job.follow:
        with closing(follow(path, job.quiet, waiting=stop.waiting, place=place)) as arrived:
            yield _text_alone(arrived, str(path))
        return
    with named(path):
        file = path.open("rb", buffering=0)
    with file:
        place.seek(file)
        yield _text_alone(arriving(file.fileno(), None, stop.waiting), str(path))
        place.note(file)


def _converted(path: Path, job: Job) -> Iterator[bytes] | None:
    """Return the text of a file that is not its bytes, in UTF-8; None for a file that is read as it is."""
    resumes = job.follow or job.load_state or job.save_state
    if resumes and is_plain(path):
        return None
    try:
        document = text_file(path)
    except EncodingError:  # bytes that are no UTF-8 are scored as U+FFFD, and counted
        return None
    if is_utf8(path, document):
        return None
    if resumes:
        raise UsageError(
            f"{path}: is converted to text as a whole, and --follow, --load-state and --save-state are for a file that "
            "grows. Leave them out, or convert it: lmlong data show --all FILE > FILE.txt."
        )
    return (piece.encode() for piece in document.pieces())


def _text_alone(arrived: Iterator[bytes], name: str) -> Iterator[bytes]:
    """Yield the input; raise a UsageError if it is binary, with a NUL among its first bytes. A later NUL is allowed:
    logs that were truncated in place have such holes."""
    read = 0
    for data in arrived:
        beginning = data[: max(0, BEGINNING - read)]
        if (place := beginning.find(b"\0")) >= 0:
            raise UsageError(
                f"{name}: byte {read + place} is NUL, so the input is not UTF-8 text. Give a document or compressed "
                "file its usual suffix, or convert it to UTF-8."
            )
        read += len(data)
        yield data


def _standard_input(quiet: float | None, waiting: Waiting) -> Iterator[bytes]:
    try:
        return arriving(sys.stdin.fileno(), quiet, waiting)
    except io.UnsupportedOperation:  # what a test or a notebook has put in its place
        return iter(lambda: sys.stdin.buffer.read(CHUNK), b"")


def _restored(job: Job, path: Path, source: str) -> tuple[TextScore, Place]:
    """Return the score of a text that goes on from a state file, and how far the file of it was read."""
    session, saved = job.trained.load_state(path), state_file.describe(path).get(SAVED)
    if saved is None:  # by `lmlong state build`
        return TextScore(job.trained, job.unit, source, None, session, job.keep, job.precision), Place()
    try:
        SavedText.model_validate(saved)
        place = Place(**saved["file"])
        totals = Totals.from_json(saved["totals"])
        text = TextScore(job.trained, job.unit, source, totals, session, job.keep, job.precision)
        text.restore(saved)
    except ValueError:
        raise CheckpointError(f"{path}: its saved score is not valid. Read the text again.") from None
    if saved["by"] != job.unit:
        raise UsageError(
            f"{path}: remembers a score by {saved['by']}. Give --by {saved['by']}, or read the text again."
        )
    return text, place


def _save(job: Job, text: TextScore, place: Place, path: Path) -> None:
    trained = job.trained
    more = {SAVED: {**text.to_json(), "by": job.unit, "file": asdict(place)}}
    belongs = (trained.owners, trained.tokenizer, str(trained.checkpoint))
    state_file.save(path, text.session, trained.model, *belongs, more)


def _saved_records(job: Job, path: Path) -> SavedRecords:
    return SavedRecords(path, job.trained.owners, str(job.trained.checkpoint))


def _restored_records(saved: SavedRecords, job: Job, lines: Lines) -> tuple[Totals, Place]:
    """Go on from what was saved of records: return what all of them cost, and how far the file of them was read."""
    options = {"field": job.field, "streams": job.streams}
    for name, given in options.items():
        if (then := saved.about.get(name)) != given:
            remedy = f"Give --{name} {then}" if then else f"Leave --{name} out"
            raise UsageError(f"{saved.path}: remembers records by --{name} {then or '(none)'}. {remedy}.")
    lines.restore(saved.about["lines"])
    return Totals.from_json(saved.about["totals"]), Place(**saved.about["file"])


def _about_records(job: Job, place: Place, lines: Lines, totals: Totals) -> dict[str, Any]:
    """Return all that `_restored_records` needs."""
    return {
        **job.trained.owners,
        "run": str(job.trained.checkpoint),
        "field": job.field,
        "streams": job.streams,
        "file": asdict(place),
        "lines": lines.to_json(),
        "totals": totals.to_json(),
    }


def _tell(job: Job, totals: Totals, more: list[str]) -> None:
    """Print to standard error what was read, and in which number format."""
    bits = f", {totals.bits / totals.bytes:.3f} bits per byte" if totals.bytes else ""
    bits += f", precision {job.precision}"
    for line in (f"{totals.bytes:,} bytes, {totals.tokens:,} tokens{bits}", *more):
        print(line, file=sys.stderr)
