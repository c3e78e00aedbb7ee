"""A session of a server in a file, as the difference from its base: the file of another session, or an empty state.

A short turn is stored as its tokens: they are read again, in the same pieces, from the session of the base, and reading
is deterministic. The rest of this text is about files that hold a state, of which every other file's base is one.

The file is safetensors with two byte arrays: `rows`, the table rows that differ from the base, and `whole`, all other
tensors. Recurrent sums change in every value, and then compress as well by themselves as beside those before. So a
session needs of its bases only their rows, down to one without a base. The metadata name the base by its id and digest,
and have the digests of both arrays and of themselves.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lmlong.checkpoint.write import save_tensors
from lmlong.errors import CheckpointError, other_format
from lmlong.inference import byte_planes, sparse, state_file
from lmlong.io.files import fsync, parse_json
from lmlong.io.system_errors import explain_errors
from lmlong.model.language_model import LanguageModel

FORMAT, KEY = 1, "lmlong.session"
TOKENS_FORMAT = 2
"""The format of a file of tokens, which versions that cannot read it refuse."""

MOST_READ = 256
"""Maximum number of tokens in a file of tokens: they are read again each time that the session is loaded."""

ROOM = 1 << 20
"""Bytes for unread text. Indices of rows take up to twice the bytes of their tensor."""


class Base(NamedTuple):
    """The name of a base."""

    session: str
    sha256: str


Pieces = tuple[tuple[int, ...], ...]
"""Tokens in the pieces in which they were read."""


class Packed(NamedTuple):
    """The two parts of a file, as bytes."""

    rows: bytes
    whole: bytes

    @property
    def bytes(self) -> int:
        return len(self.rows) + len(self.whole)


def limit_of(model: LanguageModel) -> int:
    """Return the bytes that a part may unpack to; what grows beyond it, such as keys and values, is not compressed."""
    return ROOM + 4 * sum(x.nbytes for x in state_file.empty_tensors(model, ()).values())


def pack(kept: Mapping[str, Tensor], limit: int) -> Packed:
    """Return the parts of tensors that `sparse` packed against a base."""
    return Packed(*(byte_planes.encode(part, limit) for part in sparse.split(kept)))


def save(
    path: Path, about: Mapping[str, Any], packed: Packed, base: Base | None, pieces: Pieces | None = None
) -> "SessionFile":
    """Write a file, flush it to disk and return it. With the tokens after its base, it needs only tensors of text."""
    digests = tuple(hashlib.sha256(part).hexdigest() for part in packed)
    parts = {"base": base and list(base), "parts": list(digests), "row_bytes": len(packed.rows)}
    about = {"format": FORMAT, **about, **parts}
    if pieces is not None:
        about |= {"format": TOKENS_FORMAT, "pieces": [list(piece) for piece in pieces]}
    about["sha256"] = _digest(about)
    arrays = {name: torch.frombuffer(bytearray(part), dtype=torch.uint8) for name, part in packed._asdict().items()}
    with explain_errors(path):
        path.touch(state_file.PRIVATE)
        save_tensors(arrays, path, {KEY: json.dumps(about)})
        path.chmod(state_file.PRIVATE)
        fsync(path)
    return SessionFile(path, about["sha256"], base, digests, len(packed.rows), pieces)


def _digest(about: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()


class SessionFile(NamedTuple):
    """What is known of a file after its metadata were verified."""

    path: Path
    sha256: str
    base: Base | None = None
    parts: tuple[str, ...] | None = None
    """The digests of its parts. None for a state file, which sessions were before."""
    row_bytes: int = 0
    pieces: Pieces | None = None
    """The tokens after its base. None for a file that holds a state."""

    def rows(self, limit: int) -> dict[str, Tensor]:
        """Return the indices and rows of tables, verified."""
        return sparse.split(self._tensors())[0] if self.parts is None else self._part("rows", self.parts[0], limit)

    def whole(self, limit: int) -> dict[str, Tensor]:
        """Return all other tensors, verified."""
        return sparse.split(self._tensors())[1] if self.parts is None else self._part("whole", self.parts[1], limit)

    def _tensors(self) -> dict[str, Tensor]:
        about = state_file.describe(self.path)
        if about["sha256"] != self.sha256:
            raise damaged(self.path)
        return state_file.verified(self.path, about)

    def _part(self, name: str, digest: str, limit: int) -> dict[str, Tensor]:
        try:
            with safe_open(self.path, "np") as file:
                data = file.get_tensor(name).tobytes()
            if hashlib.sha256(data).hexdigest() != digest:
                raise ValueError("its sha256 differs")
            return byte_planes.decode(data, limit)
        except (OSError, SafetensorError, ValueError, TypeError) as error:
            raise damaged(self.path) from error


def describe(path: Path) -> tuple[SessionFile, dict[str, Any]]:
    """Return a file and its metadata. Raises CheckpointError if it is damaged or of another kind."""
    try:
        found = state_file.metadata(path)
        if KEY not in found:
            about = state_file.describe(path)
            return SessionFile(path, about["sha256"]), about
        about = dict(parse_json(found[KEY]))
        state_file.check_about(about)
        if about["format"] not in (FORMAT, TOKENS_FORMAT):
            raise CheckpointError(other_format(path, about["format"], TOKENS_FORMAT, "Read the text again"))
        if about["sha256"] != _digest({name: value for name, value in about.items() if name != "sha256"}):
            raise ValueError("its sha256 differs")
        base = about["base"] and Base(*map(str, about["base"]))
        rows, whole = map(str, about["parts"])
        if type(about["id"]) is not str or type(about["row_bytes"]) is not int or about["row_bytes"] < 0:
            raise ValueError("it has no id, or no size of rows")
        pieces = _pieces(about["pieces"]) if about["format"] == TOKENS_FORMAT else None
        if pieces is not None and not base:
            raise ValueError("its tokens follow no base")
        return SessionFile(path, about["sha256"], base or None, (rows, whole), about["row_bytes"], pieces), about
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        raise damaged(path) from error


def _pieces(value: Any) -> Pieces:
    pieces = tuple(tuple(piece) for piece in value)
    tokens = [token for piece in pieces for token in piece]
    if not all(pieces) or len(tokens) > MOST_READ or not all(type(token) is int for token in tokens):
        raise ValueError("its tokens are not numbers, or too many")
    return pieces


def damaged(path: Path) -> CheckpointError:
    return CheckpointError(f"{path}: not a session, or damaged. Read the text again.")


class Known(NamedTuple):
    """A session on the way down to one without a base: its file, or its tensors if they are in memory."""

    file: SessionFile
    tensors: Mapping[str, Tensor] | None = None


def _chosen(tensors: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    chosen = {name: tensors.get(name) for name in names}
    if missing := [name for name, x in chosen.items() if x is None]:
        raise ValueError(f"{min(missing)} is missing in a base")
    return {name: x for name, x in chosen.items() if x is not None}


def tensors_of(chain: Iterable[Known], model: LanguageModel, limit: int) -> dict[str, Tensor]:
    """Return the tensors of the first session of a chain, each of whose files is the base of the one before. Raises
    CheckpointError or ValueError if they are damaged."""
    tensors: dict[str, Tensor] = {}
    changes: dict[str, list[tuple[Tensor, Tensor | None]]] = {}
    sought: set[str] | None = None  # tensors that a base has; at first all
    for file, known in chain:
        if known is not None:
            tensors |= _chosen(known, known if sought is None else sought)
            break
        rows = file.rows(limit)
        tables = sparse.of_tables(rows)
        if sought is None or sought - tables.keys():
            whole = file.whole(limit)
            tensors |= _chosen(whole, whole if sought is None else sought - tables.keys())
        sought = set(tables) if sought is None else sought & tables.keys()
        for name in sought:
            changes.setdefault(name, []).append((tables[name], rows.get(name + sparse.ROWS)))
        if not sought:
            break
    empty = state_file.empty_tensors(model, [*tensors, *changes])
    for name, found_rows in changes.items():
        if name not in tensors and name not in empty:
            raise ValueError(name)
        x = (tensors if name in tensors else empty)[name].detach().cpu().clone().contiguous()
        for indices, of_rows in reversed(found_rows):
            x = sparse.filled(name, x, indices, of_rows)
        tensors[name] = x
    return tensors
