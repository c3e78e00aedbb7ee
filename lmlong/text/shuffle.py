"""Random draws and orders that are pure functions: nothing to store, nothing to save, the same on every machine."""

from hashlib import blake2b

ROUNDS = 4


def draw(*key: int) -> int:
    """A number below 2**64 that follows from `key` alone."""
    return int.from_bytes(blake2b(repr(key).encode(), digest_size=8).digest(), "big")


def shuffled(index: int, size: int, key: tuple[int, ...]) -> int:
    """The element at `index` of a drawn order of range(size), found without making the others.

    A Feistel network permutes the numbers of an even count of bits; one that lands beyond `size` goes through again.
    """
    half = ((size - 1).bit_length() + 1) // 2
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for turn in range(ROUNDS):
            left, right = right, left ^ draw(*key, turn, right) & mask
        index = left << half | right
        if index < size:
            return index
