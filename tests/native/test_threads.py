"""How many threads compute, and how they wait for each other."""

import os
import sys

import pytest
import torch
from click.testing import CliRunner

from lmlong.cli.evaluate import eval_
from lmlong.native import threads
from lmlong.native.threads import ThreadChoice, cores_are_busy, spare_busy_cores


class Machine:
    """A computation that takes a time by the number of threads, told by a clock of its own."""

    def __init__(self) -> None:
        self.seconds, self.now, self.calls = {1: 2.0, 4: 1.0}, 0.0, []

    def __call__(self, count: int) -> int:
        self.now += self.seconds[count]
        self.calls.append(count)
        return count

    def last(self, choice: ThreadChoice, calls: int) -> int:
        """Call it so often; how many threads the most of the last calls had."""
        del self.calls[:]
        for _ in range(calls):
            threads, begun = choice.threads(4), self.now
            self(threads)
            choice.note(threads, self.now - begun)
        return max((1, 4), key=self.calls[-100:].count)


def test_faster_number_of_threads_is_found_by_trials_that_cost_little() -> None:
    machine, choice = Machine(), ThreadChoice()
    assert machine.last(choice, 1000) == 4
    machine.seconds[4] = 50.0  # the cores are busy now
    assert machine.last(choice, 10_000) == 1
    machine.seconds[4], begun = 200.0, machine.now
    machine.last(choice, 10_000)
    assert machine.now - begun < 1.1 * 10_000 * machine.seconds[1]
    machine.seconds[4] = 1.0
    assert machine.last(choice, 10_000) == 4


def test_one_thread_needs_no_trial() -> None:
    choice = ThreadChoice()
    for _ in range(20):
        assert choice.threads(1) == 1
        choice.note(1, 1.0)


def test_one_option_sets_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    usual = torch.get_num_threads()
    try:
        CliRunner().invoke(eval_, ["--threads", "3", "no-such-run"])
        assert torch.get_num_threads() == 3 and os.environ["OMP_NUM_THREADS"] == "3"
    finally:
        torch.set_num_threads(usual)
    assert CliRunner().invoke(eval_, ["--threads", "0", "no-such-run"]).exit_code == 2


@pytest.mark.parametrize(("running", "own", "busy"), [(1, "", False), (2, "", True), (99, "1", False), (2, "2", False)])
def test_busy_cores_are_known(monkeypatch: pytest.MonkeyPatch, running: int, own: str, busy: bool) -> None:
    monkeypatch.setattr(threads, "_running", lambda: running)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setenv("OMP_NUM_THREADS", own)
    assert cores_are_busy() == busy


@pytest.mark.parametrize("given", [None, "ACTIVE"])
def test_threads_sleep_on_busy_cores(monkeypatch: pytest.MonkeyPatch, given: str | None) -> None:
    monkeypatch.setattr(threads, "cores_are_busy", lambda: True)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    spare_busy_cores()
    assert "OMP_WAIT_POLICY" not in os.environ  # too late: torch is here
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setenv("OMP_WAIT_POLICY", given or "")
    if given is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    spare_busy_cores()
    assert os.environ["OMP_WAIT_POLICY"] == (given or "PASSIVE")
