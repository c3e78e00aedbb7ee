"""Reading a long text: its progress where there is no terminal, and signals that end it."""

import signal

import pytest

from lmlong.cli import reading
from lmlong.cli.stop import Stop
from lmlong.report import progress


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (None, ["reading pipe: 2.0 MB, 1.0 MB/s", "reading pipe: 4.0 MB, 0.3 MB/s"]),
        (
            8_000_000,
            ["reading pipe: 25% of 8.0 MB, 1.0 MB/s, 00:06 left", "reading pipe: 50% of 8.0 MB, 0.3 MB/s, 00:13 left"],
        ),
    ],
)
def test_progress_is_printed_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], size: int | None, expected: list[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(progress, "FIRST", 2.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    text = reading.with_progress(iter(["a" * 1_000_000] * 5), "pipe", size)
    for now[0] in (0.0, 1.0, 2.0, 11.0, 13.0):
        next(text, None)
    output, errors = capsys.readouterr()
    assert (output, errors.splitlines()) == ("", expected)


def test_second_signal_ends_at_once() -> None:
    with Stop() as stop:
        assert list(stop.until(iter([b"some", b"text"]))) == [b"some", b"text"]
        with pytest.raises(InterruptedError), stop.waiting():
            signal.raise_signal(signal.SIGTERM)
        assert stop.received == signal.SIGTERM
        assert list(stop.until(iter([b"more"]))) == []
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
