"""Random numbers and orders as pure functions: without state, and the same on every machine."""

from hashlib import blake2b

ROUNDS = 4

FEW = 16
"""Up to this many elements a Feistel network is far from uniform, since its halves have at most two bits: of 5
elements, some come first a third too often."""


def draw(*key: int) -> int:
    """Return a random number below 2**64 that depends only on `key`."""
    return int.from_bytes(blake2b(repr(key).encode(), digest_size=8).digest(), "big")


def shuffled(index: int, size: int, key: tuple[int, ...]) -> int:
    """Return the element at `index` of a random order of range(size), computed without the others.

    A Feistel network permutes the numbers of an even number of bits. A result beyond `size` goes through it again. Up
    to FEW elements are sorted by random numbers instead.
    """
    if size <= FEW:
        return sorted(range(size), key=lambda element: draw(*key, element))[index]
    half = ((size - 1).bit_length() + 1) // 2
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for turn in range(ROUNDS):
            left, right = right, left ^ draw(*key, turn, right) & mask
        index = left << half | right
        if index < size:
            return index
