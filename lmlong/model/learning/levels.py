"""What the output layer may learn from a text. Importing this module does not import torch."""

from typing import Literal

Level = Literal["output", "bias"]
"""A matrix and a bias, or only a bias, which costs less and gains less."""

LEVELS: tuple[Level, ...] = ("output", "bias")


def as_level(learn: Level | bool | None, default: Level | None = None) -> Level | None:
    """Return what an option `learn` asks for: True stands for `default` or the first level, None for `default`."""
    if learn is None:
        return default
    return (default or LEVELS[0]) if learn is True else learn or None
