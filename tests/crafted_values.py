"""Random changes of plain values and bytes, and state files with correct digests."""

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from lmlong.inference import state_file

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 300, 2**24, 2**31, 2**63, 2**64, 10**30, -(10**30), 10**400),
    *(0.5, -0.5, -0.0, 1.5, 1e308, float("nan"), float("inf")),
    *("", "x", "ff", "\ud800", "\0", "é", "x" * 3000, "<s>", "a b", "Ġ", "▁"),
    *([], [0], [[]], [None], ["x"], ["x", "y"], [1, 2], {}, {"": 0}, {"x": 1}, {"type": "x"}, {"content": "<s>"}),
    {"type": "Sequence", "pretokenizers": []},
)


def places(value: Any, place: tuple[Any, ...] = (), deep: int = 4) -> list[tuple[Any, ...]]:
    """Return where values are inside a value; of a long list or table the first few."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    inside = list(items)[:12]
    return [place, *(each for key, item in inside if deep for each in places(item, (*place, key), deep - 1))]


def replaced(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    """Return a value with another one at a place."""
    if not place:
        return new
    copied = dict(value) if isinstance(value, dict) else list(value)
    copied[place[0]] = replaced(value[place[0]], place[1:], new)
    return copied


def changed(draw: Random, value: Any) -> Any:
    """Change one value somewhere in plain values; a list may also get shorter or longer, a table lose an entry."""
    place = draw.choice(places(value))
    inside = value
    for key in place:
        inside = inside[key]
    options = [draw.choice(VALUES)] * 4
    if isinstance(inside, list) and inside:
        options += [inside * 2, inside[:-1]]
    elif isinstance(inside, dict) and inside:
        without = draw.choice(sorted(inside))
        options.append({key: each for key, each in inside.items() if key != without})
    return replaced(value, place, draw.choice(options))


def changed_bytes(draw: Random, data: bytes, parts: Sequence[bytes] = ()) -> bytes:
    """Put in, leave out, repeat or change a few bytes, or cut the rest off; `parts` may be put in too."""
    found = bytearray(data) or bytearray(b"x")
    for _ in range(draw.choice((1, 1, 2, 8))):
        at, size = draw.randrange(len(found)), draw.randint(1, 40)
        match draw.randrange(6):
            case 0:
                found[at] ^= 1 << draw.randrange(8)
            case 1:
                del found[at : at + size]
            case 2:
                found[at:at] = found[at : at + size] * draw.choice((1, 1, 300))
            case 3 if draw.random() < 0.3:
                del found[at:]
            case _:
                found[at:at] = draw.choice(parts) if parts else bytes([draw.choice(b"0123456789-.:[]{}~\n \xff")])
        found = found or bytearray(b"x")
    return bytes(found)


def write_state(file: Path, about: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write a state file with this metadata and these tensors, and the digest of them."""
    about = {name: value for name, value in about.items() if name != "sha256"}
    digest = state_file._digest(about, tensors)
    save_file(tensors, file, {"lmlong": json.dumps({**about, "sha256": digest})})
