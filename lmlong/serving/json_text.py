"""JSON of clients, read in bounded memory.

A value of two bytes, such as `{}`, takes 64 bytes or more once parsed, so a limit of bytes does not bound memory. The
values of a text are counted before it is parsed.
"""

import json
from itertools import accumulate
from typing import Any, NoReturn

from lmlong.serving.api_errors import ApiError

MOST_VALUES = 1 << 16
"""Maximum values of a body; 4,096 messages in parts have about 40,000."""

MOST_DEPTH = 64
MOST_KEYS = 256
"""Maximum levels of a body, and keys of one of its objects."""

BRACKETS = b"[]{}"
OTHER_BYTES = bytes(byte for byte in range(256) if byte not in BRACKETS)
STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


def read_json(data: bytes) -> Any:
    """Return the value of a JSON text in UTF-8; raise a 400 if it is not JSON, or exceeds the limits."""
    check_structure(data)
    try:
        return json.loads(data.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_object)
    except (ValueError, RecursionError):
        raise ApiError(400, "The body is not JSON that can be read. Send an object of JSON in UTF-8.") from None


def check_structure(data: bytes) -> None:
    """Refuse JSON of too many values or levels, without parsing it. Text that is not JSON may pass, if it has no more
    values than the limit up to its first error."""
    without_escapes = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    if without_escapes.count(b'"') > 4 * MOST_VALUES:  # two for each string: a value, or its key
        raise _too_many()
    outside_strings = b"".join(without_escapes.split(b'"')[::2])
    brackets = outside_strings.translate(None, OTHER_BYTES)
    if outside_strings.count(b",") + len(brackets) // 2 >= MOST_VALUES:
        raise _too_many()
    if max(accumulate(map(STEPS.__getitem__, brackets)), default=0) > MOST_DEPTH:
        raise ApiError(400, f"The body is nested more than {MOST_DEPTH} levels deep. Send a flatter one.")


def _too_many() -> ApiError:
    return ApiError(400, f"The body has more than {MOST_VALUES:,} values. Send fewer, or several requests.")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MOST_KEYS:
        raise ApiError(
            400, f"The body has an object of {len(pairs):,} keys. Leave out those that the API does not name."
        )
    return dict(pairs)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
