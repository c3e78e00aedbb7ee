"""A session in a file, from which the model that read the text, and no other, continues at once.

The file is safetensors: the tensors of the session, named by their paths, and metadata as JSON that identifies the
model.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from safetensors.torch import save as serialized
from torch import Tensor

from lmlong.attention.state_check import StateError, check_alike, check_range
from lmlong.checkpoint.write import save_one_at_a_time
from lmlong.data.tokenizers.base import LOSSLESS, PART, Tokenizer
from lmlong.errors import CheckpointError, UsageError, other_format
from lmlong.inference import sparse
from lmlong.inference.session import NO_TOKEN, Session, last_tokens
from lmlong.inference.unread import UnreadText
from lmlong.io.files import check_ordinary, fsync, parse_json, staged
from lmlong.io.system_errors import explain_errors
from lmlong.model.language_model import MOST_TOKENS, LanguageModel, ModelState
from lmlong.model.learning.read import first_state
from lmlong.model.sampling_options import RECENT
from lmlong.model.state import named_tensors, rebuild_state

FORMAT = 3
HEADER = b'{"__metadata__":{"lmlong'
"""How a file begins, after eight bytes."""

PRIVATE = 0o600
"""Permissions of a state file: it contains text, so only its owner may read it."""

TAIL = 200
"""Characters at the end of the text that are saved with the state, for display."""

ABOUT = {"run": str, "tokens": int, "tail": str, "tokenizer": str, "features": str, "model": str, "sha256": str}
"""The types of a file's metadata, beside its format."""

OWNERS = {"tokenizer": "tokenizer", "features": "draw of random features", "model": "weights"}
"""The hashes that a state is bound to, with their meanings, the most informative first."""


class Stored(NamedTuple):
    """A session as the tensors of a file, which have the names of these fields."""

    state: ModelState
    last: Tensor  # (1,)
    recent: Tensor  # (1, RECENT) NO_TOKEN before the beginning
    total: Tensor  # (1,)
    unread: "StoredUnread"

    @property
    def session(self) -> Session:
        """Return the session; raise ValueError for unread text that is not bytes."""
        before, pending, chosen = ([value - 1 for value in part[0].tolist() if value] for part in self.unread)
        unread = UnreadText(bytes(before), bytes(pending), tuple(chosen))
        recent = tuple(token for token in self.recent[0].tolist() if token != NO_TOKEN)
        return Session(self.state, recent, int(self.total), unread)


class StoredUnread(NamedTuple):
    """Unread text as tensors: bytes and tokens, each plus 1, after any number of zeros."""

    before: Tensor  # (1, any) int16
    pending: Tensor  # (1, any) int16
    chosen: Tensor  # (1, any) int64


def stored(session: Session) -> Stored:
    """Return a session as tensors."""
    device = session.state.position.device
    before, pending, chosen = ([value + 1 for value in part] for part in session.unread)
    return Stored(
        session.state,
        torch.tensor([session.last], device=device),
        torch.tensor([last_tokens(session.recent, RECENT)], device=device),
        torch.tensor([session.total], device=device),
        StoredUnread(
            torch.tensor([before], dtype=torch.int16, device=device),
            torch.tensor([pending], dtype=torch.int16, device=device),
            torch.tensor([chosen], dtype=torch.long, device=device),
        ),
    )


def save(
    path: Path,
    session: Session,
    model: LanguageModel,
    belongs: dict[str, str],
    tokenizer: Tokenizer,
    run: str,
    more: Mapping[str, Any] | None = None,
    durable: bool = True,
) -> None:
    """Write the session of one text so that the file is complete or absent, with `durable` also after a power failure.

    `more` is additional metadata for `describe`.
    """
    if path.exists() and not path.is_file():
        raise UsageError(f"{path}: not a regular file, so it cannot be replaced. Choose another name.")
    about = {"format": FORMAT, "run": run, "tokens": session.total, "tail": tail_of(session, tokenizer)}
    about |= {**belongs, **(more or {})}
    named = named_tensors(stored(session._replace(state=model.settle(session.state))))
    kept = {name: tensor.detach().cpu().contiguous() for name, tensor in named}
    kept = sparse.pack(kept, empty_tensors(model, kept))
    unfinished = staged(path)
    with explain_errors(path):
        try:
            unfinished.touch(PRIVATE)
            text = json.dumps({**about, "sha256": _digest(about, kept)})
            save_one_at_a_time(kept, unfinished, {"lmlong": text})
            unfinished.chmod(PRIVATE)
            if durable:
                fsync(unfinished)
            unfinished.replace(path)
        finally:
            with suppress(OSError):
                unfinished.unlink()


def load(path: Path, model: LanguageModel, belongs: dict[str, str], tokenizer: Tokenizer, run: str) -> Session:
    """Return the session in a file, after validating it: a digest only shows that a file is complete, and anybody can
    compute one."""
    about = describe(path)
    _refuse_other(path, about, belongs, run)
    tensors = verified(path, about)
    try:
        return restored(sparse.unpack(tensors, empty_tensors(model, tensors)), model, tokenizer)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}. Read the text again.") from None


def empty_tensors(model: LanguageModel, names: Iterable[str]) -> dict[str, Tensor]:
    """Return the tensors of an empty session that learns what one with tensors of these names does."""
    return dict(named_tensors(_empty(model, _learns(names))))


def restored(tensors: Mapping[str, Tensor], model: LanguageModel, tokenizer: Tokenizer) -> Session:
    """Return the session of tensors from a file; raise ValueError if they are not possible for this model."""
    empty = _empty(model, _learns(tensors))
    expected = dict(named_tensors(empty))
    unread = {name: tensor for name, tensor in expected.items() if name.startswith("unread.")}
    if not tensors.keys() & unread.keys():  # a file from before sessions left text unread
        tensors = {**tensors, **unread}
    mismatched = tensors.keys() ^ expected.keys()
    if mismatched == {"state.learned.delta.D"}:
        raise StateError("an earlier version of lmlong learned only a bias in it, which this one does not continue")
    if mismatched:
        raise StateError(f"{min(mismatched)} is missing, or not a tensor of this model's state")
    _check(rebuild_state(empty, iter([tensors[name] for name in expected])), empty, model, tokenizer)
    device = model.embedding.weight.device
    dtypes = {name: _dtype(name, tensors[name], tensor) for name, tensor in expected.items()}
    own = [tensors[name].to(device, dtype, copy=True) for name, dtype in dtypes.items()]  # not views of the file
    return rebuild_state(empty, iter(own)).session


def _dtype(name: str, x: Tensor, expected: Tensor) -> torch.dtype:
    """Return the dtype in which a tensor of a file is read: that of this model, and for the sums of its layers at least
    that, since they keep their precision."""
    is_sum = name.startswith("state.blocks.") and expected.dtype != torch.bfloat16
    return torch.promote_types(x.dtype, expected.dtype) if is_sum else expected.dtype


def _check(session: Stored, empty: Stored, model: LanguageModel, tokenizer: Tokenizer) -> None:
    """Raise StateError unless a session is possible for this model."""
    try:
        model.check_state(session.state, empty.state)
    except StateError as error:
        raise error.inside("state") from None
    for name in ("last", "recent", "total"):
        check_alike(getattr(session, name), getattr(empty, name), name=name)
    most = model.embedding.num_embeddings - 1
    check_range("last", session.last, 0, most)
    check_range("recent", session.recent, NO_TOKEN, most)
    check_range("total", session.total, 1, MOST_TOKENS)
    if int(session.state.position) >= int(session.total):
        raise StateError("state.position is not before total")
    present = session.recent[0] != NO_TOKEN
    if int(session.recent[0, -1]) != int(session.last) or bool((present[:-1] & ~present[1:]).any()):
        raise StateError("recent does not end with the last token, or has gaps")
    check_alike(session.unread, empty.unread, grows=True, name="unread")
    check_range("unread.chosen", session.unread.chosen, 0, most + 1)
    try:
        unread = session.session.unread
    except ValueError:
        raise StateError("unread is not bytes") from None
    check_unread(unread, tokenizer)


def check_unread(unread: UnreadText, tokenizer: Tokenizer) -> None:
    """Raise StateError unless unread text is one part of a text, in characters and tokens of the tokenizer."""
    try:
        text = unread.text()
    except ValueError:
        raise StateError("unread is not text in UTF-8") from None
    if len(text) > 2 * PART or tokenizer.representable(text) != text:
        raise StateError(f"unread is longer than {2 * PART} characters, or has some without a token")
    if len(unread.chosen) > 2 * PART:
        raise StateError(f"unread.chosen has {len(unread.chosen):,} tokens, which is more than {2 * PART:,}")
    if unread.chosen and tokenizer.decode_bytes(list(unread.chosen)) != unread.pending:
        raise StateError("unread.chosen are not the tokens of unread.pending")


def _refuse_other(path: Path, about: Mapping[str, Any], belongs: dict[str, str], run: str) -> None:
    """Refuse a file made with another model, naming the difference."""
    for key, meaning in OWNERS.items():
        if about.get(key) != belongs[key]:
            raise CheckpointError(
                f"{path}: made with another {meaning} ({str(about.get(key))[:12]}) than that of {run} "
                f"({belongs[key][:12]}). Use it with {about.get('run')}, or read the text again by lmlong state build."
            )


def is_state(data: bytes) -> bool:
    """Return whether this is the beginning of a state file, which may be cut off."""
    return not data or (len(data) > 8 and HEADER.startswith(data[8 : 8 + len(HEADER)]))


def delete(path: Path) -> None:
    """Delete a state file, whole or cut off. A file of another kind stays."""
    with suppress(OSError):
        if path.is_symlink() or not path.is_file():
            return
        with path.open("rb") as file:
            if is_state(file.read(8 + len(HEADER))):
                path.unlink()


def describe(path: Path) -> dict[str, Any]:
    """Return the metadata of the session in a file."""
    try:
        check_ordinary(path)
        with safe_open(path, "pt") as file:
            about = dict(parse_json((file.metadata() or {})["lmlong"]))
        if type(about["format"]) is int and about["format"] != FORMAT:
            raise CheckpointError(other_format(path, about["format"], FORMAT, "Read the text again"))
        if type(about["format"]) is not int or not all(type(about[name]) is kind for name, kind in ABOUT.items()):
            raise ValueError
        return about
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file. Make one by lmlong state build.") from None
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path}: not a state file of lmlong, or damaged. Make one by lmlong state build."
        ) from error


def verified(path: Path, about: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a file, verified by its digest."""
    tensors = load_file(path)
    if about["sha256"] != _digest({name: value for name, value in about.items() if name != "sha256"}, tensors):
        raise CheckpointError(f"{path}: not what was saved (its sha256 differs). Read the text again.")
    return tensors


def _digest(about: dict[str, Any], kept: dict[str, Tensor]) -> str:
    """Return the sha256 of a file's metadata and tensors."""
    return hashlib.sha256(json.dumps(about).encode() + serialized(kept)).hexdigest()


def tail_of(session: Session, tokenizer: Tokenizer) -> str:
    """Return the end of the text as characters."""
    data = tokenizer.decode_bytes(session.recent) + session.unread.pending
    return data.decode("utf-8", LOSSLESS)[-TAIL:]


def _learns(names: Iterable[str]) -> bool:
    """Return whether the session in a file learns from its text, by the names of its tensors."""
    return any(name.startswith("state.learned.") for name in names)


def _empty(model: LanguageModel, learn: bool) -> Stored:
    """Return an empty session; its tensors have the shapes of every session's, except those of growing states."""
    return stored(Session(first_state(model, 1, learn), (0,) * RECENT, 0))
