"""The progress of reading a long text, where there is no terminal."""

import pytest

from lmlong.cli import reading


@pytest.mark.parametrize(("size", "line"), [(None, "pipe: read 3.0 MB\n"), (4_000_000, "pipe: read 3.0 of 4.0 MB\n")])
def test_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], size: int | None, line: str
) -> None:
    now = [0.0]
    monkeypatch.setattr(reading.time, "monotonic", lambda: now[0])
    text = reading.with_progress(iter(["a" * 1_000_000] * 4), "pipe", size)
    for now[0] in (0.0, 1.0, 2.0, 10.5, 11.0):
        next(text, None)
    assert capsys.readouterr() == ("", line)
