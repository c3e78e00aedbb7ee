"""The rates of learning while reading that were fitted to the weights of a checkpoint, in a file of it."""

from math import isfinite
from pathlib import Path

from lmlong.errors import CheckpointError
from lmlong.io.files import atomic_write, read_checksummed, with_checksum
from lmlong.model.learning.state import Rates

NAME = "learning.json"
"""Not listed in the manifest, since it is written after the checkpoint."""

LARGEST = 1e6


def write_rates(checkpoint: Path, rates: Rates) -> None:
    atomic_write(checkpoint / NAME, with_checksum(rates._asdict()))


def read_rates(checkpoint: Path) -> Rates | None:
    """Return the rates of a checkpoint; None if none were fitted."""
    path = checkpoint / NAME
    try:
        content = read_checksummed(path.read_bytes())
        rates = Rates(**content)
        if not all(type(x) is float and isfinite(x) and 0 < x <= LARGEST for x in rates):
            raise ValueError
        return rates
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, OSError):
        raise CheckpointError(f"{path}: damaged. Remove it to learn with the default rates.") from None
