"""Bytes against closed forms, and passes in turns."""

import time

import torch

from lmlong.bench.timer import MAX_ROUNDS, MIN_ROUNDS, peak_bytes, time_rounds

CPU = torch.device("cpu")
KILO = 4000  # bytes of a thousand floats


def test_what_is_held_is_what_is_there_at_one_time() -> None:
    x = torch.zeros(1000)

    def chained() -> torch.Tensor:
        y = x + 1
        for _ in range(5):
            y = y + 1  # the one before is there until this one is
        return y

    assert peak_bytes(chained, CPU) == 2 * KILO
    assert peak_bytes(lambda: [x + 1, x + 2, x + 3], CPU) == 3 * KILO
    assert peak_bytes(lambda: torch.cat([x, x]) @ torch.cat([x, x]), CPU) == 4 * KILO + 4


def test_inputs_and_views_of_them_are_not_held() -> None:
    x = torch.zeros(10, 100)
    assert peak_bytes(lambda: x.T[:5].unflatten(0, (5, 1)), CPU) == 0
    assert peak_bytes(lambda: x.add_(1), CPU) == 0
    assert peak_bytes(lambda: (x + 1).T[:1], CPU) == KILO  # a view keeps all of what it views


def test_shapes_alone_are_counted_alike() -> None:
    x = torch.zeros(10**6, device="meta")
    assert peak_bytes(lambda: (x * 2).exp(), torch.device("meta")) == 2000 * KILO


def test_every_round_has_all_passes_in_turn() -> None:
    done: list[str] = []
    seconds = time_rounds({name: lambda name=name: done.append(name) for name in "abc"}, CPU)  # type: ignore[misc]
    assert MIN_ROUNDS <= len(seconds["a"]) <= MAX_ROUNDS
    assert done == list("abc") * len(seconds["a"])
    assert {len(rounds) for rounds in seconds.values()} == {len(seconds["a"])}


def test_passes_that_take_long_have_few_rounds() -> None:
    assert len(time_rounds({"a": lambda: time.sleep(0.001)}, CPU)["a"]) == MAX_ROUNDS
    assert len(time_rounds({"a": lambda: time.sleep(0.001)}, CPU, max_seconds=0.0)["a"]) == MIN_ROUNDS
