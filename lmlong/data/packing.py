"""Pack pieces of text into rows of one length, with little padding."""

from bisect import bisect_left, insort
from collections import defaultdict

import numpy as np


def cut(starts: np.ndarray, total: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the begins and ends of the documents that begin at `starts`, cut into pieces of at most `length`."""
    sizes = np.diff(starts, append=total)
    pieces = -(-sizes // length)
    # the index of each piece within its document
    within = np.arange(pieces.sum()) - np.repeat(pieces.cumsum() - pieces, pieces)
    begins = np.repeat(starts, pieces) + within * length
    return begins, np.minimum(begins + length, np.repeat(starts + sizes, pieces))


def pack(sizes: np.ndarray, length: int) -> list[np.ndarray]:
    """Return the indices of the pieces in each row: best-fit decreasing, each into the fullest row that has room."""
    rows: list[list[int]] = []
    roomy: defaultdict[int, list[int]] = defaultdict(list)  # rows by the room they have left
    rooms: list[int] = []  # the different amounts of room there are, in order
    for piece in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[piece])
        place = bisect_left(rooms, size)
        if place == len(rooms):
            rows.append([])
            row, room = len(rows) - 1, length
        else:
            room = rooms[place]
            row = roomy[room].pop()
            if not roomy[room]:
                del rooms[place]
        rows[row].append(piece)
        if left := room - size:
            if not roomy[left]:
                insort(rooms, left)
            roomy[left].append(row)
    return [np.array(row) for row in rows]
