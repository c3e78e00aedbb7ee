"""Windows that occur in other text are found, wherever a text is cut, and in bounded memory."""

import random

import numpy as np
import pytest

from lmlong.data import windows
from lmlong.data.windows import BLOCK, WINDOW, WindowSample, window_hashes


def drawn(size: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(size)


def cut(data: bytes, seed: int, most: int) -> list[bytes]:
    draw, pieces = random.Random(seed), []
    while data:
        size = draw.randint(1, most)
        pieces.append(data[:size])
        data = data[size:]
    return pieces


def hashes_of(*texts: list[bytes]) -> tuple[list[int], list[int]]:
    found = list(window_hashes(enumerate(texts)))
    return [int(x) for hashes, _ in found for x in hashes], [int(x) for _, numbers in found for x in numbers]


@pytest.mark.parametrize("sizes", [[BLOCK * 2 + 77], [0, 49, 50, 51, 3000, 7], [BLOCK, 60, BLOCK - WINDOW + 1, 60]])
def test_each_window_of_each_document_has_the_hash_of_its_bytes(sizes: list[int]) -> None:
    texts = [drawn(size, seed) for seed, size in enumerate(sizes)]
    hashes, numbers = hashes_of(*(cut(text, 1, 5000) for text in texts))
    assert numbers == [number for number, size in enumerate(sizes) for _ in range(max(size - WINDOW + 1, 0))]
    place = 0
    for text in texts:
        for begin in range(0, len(text) - WINDOW + 1, 997):
            assert hashes[place + begin] == hashes_of([text[begin : begin + WINDOW]])[0][0]
        place += max(len(text) - WINDOW + 1, 0)
    assert len(set(hashes)) == len(hashes)


def share(windows: WindowSample, documents: int) -> list[float]:
    kept, seen = windows.counts(documents)
    return list(seen / np.maximum(kept, 1))


@pytest.mark.parametrize("most", [1 << 20, 2000])
def test_windows_that_occur_in_other_text_are_found(most: int) -> None:
    one, two, other = drawn(20_000, 1), drawn(20_000, 2), drawn(100_000, 3)
    held = WindowSample(most)
    held.add(enumerate([cut(one, 1, 999), cut(two, 2, 999), [drawn(20_000, 4)]]))
    held.find([cut(other + two + other, 3, 9999), [one[:5000]]])
    found = share(held, 3)
    assert found[0] == pytest.approx(0.25, abs=0.0025 if most > 60_000 else 0.05)
    assert found[1:] == [1, 0]
    kept, _ = held.counts(3)
    assert kept.sum() == 3 * (20_000 - WINDOW + 1) if most > 60_000 else 1000 < kept.sum() <= most


def test_documents_that_are_marked_are_found_in_the_others() -> None:
    text = drawn(4000, 1)
    held = WindowSample()
    held.add(enumerate([[text], [text[:2000] + drawn(2000, 2)]]))
    assert share(held, 2) == [0, 0]
    held.mark(np.array([True, False]))
    assert share(held, 2) == [1, pytest.approx(0.5, abs=0.02)]


def test_no_text_has_no_windows() -> None:
    held = WindowSample()
    held.add([(0, [b"short"])])
    held.find([[drawn(1000, 1)]])
    assert share(held, 1) == [0] and share(held, 0) == []
    assert windows.MAX_WINDOWS < 1 << 21
