"""What `lmlong eval --json` told of a model, for its card."""

from pathlib import Path
from typing import Any

from lmlong.errors import UsageError
from lmlong.io.files import parse_json


def read_evaluation(file: Path) -> dict[str, Any]:
    """Return what a file tells of one run by length."""
    try:
        (told,) = parse_json(file.read_bytes())["runs"]
        for at in told["context"]:
            float(at["bits_per_byte"]), int(at["length"])
    except (ValueError, TypeError, KeyError, OSError):
        raise UsageError(
            f"{file}: not of one run by `lmlong eval RUN --json`. Measure it again, or leave it out."
        ) from None
    return told
