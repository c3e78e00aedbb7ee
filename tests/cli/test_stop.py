"""Signals to commands that read without end."""

import signal

import pytest

from lmlong.cli.stop import Stop


def test_the_first_signal_ends_the_wait_and_the_second_ends_at_once() -> None:
    with Stop() as stop:
        assert list(stop.until(iter([b"some", b"text"]))) == [b"some", b"text"]
        with pytest.raises(InterruptedError), stop.waiting():
            signal.raise_signal(signal.SIGTERM)
        assert stop.received == signal.SIGTERM
        assert list(stop.until(iter([b"more"]))) == []
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
