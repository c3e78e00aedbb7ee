"""A session as a file: the model that read a text, and no other, continues from it at once.

The file is safetensors: the tensors of the session, named by their paths in it, and as JSON the model that they belong
to.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from safetensors.torch import save as serialized
from torch import Tensor

from lmlong.attention.favor import Favor
from lmlong.checkpoint.write import save_tensors
from lmlong.data.tokenizer import LOSSLESS, Tokenizer
from lmlong.errors import CheckpointError, UsageError, other_format
from lmlong.inference import sparse
from lmlong.inference.session import NO_TOKEN, Session
from lmlong.inference.unread import UnreadText, as_tensors
from lmlong.io.files import fsync, parse_json
from lmlong.io.system_errors import named
from lmlong.model.language_model import LanguageModel
from lmlong.model.sampling_options import RECENT
from lmlong.model.state import fits_shape, rebuild_state

FORMAT = 3
PRIVATE = 0o600
"""Permissions of a state file, which holds text: only its owner may read it."""

TAIL = 200
"""Characters of the end of the text that are saved with the state, for people."""

PRECISE = {torch.float32, torch.float64}
"""Dtypes of tensors whose precision may differ."""

ABOUT = {"run": str, "tokens": int, "tail": str, "tokenizer": str, "features": str, "model": str, "sha256": str}
"""The types of a file's metadata, beside its format."""

NOTHING_MORE: Mapping[str, Any] = MappingProxyType({})

OWNERS = {"tokenizer": "tokenizer", "features": "draw of random features", "model": "weights"}
"""What a state belongs to, the most informative difference first."""


def owners(model: LanguageModel, tokenizer: Tokenizer, weights: str) -> dict[str, str]:
    """Return hashes of all that a state is meaningless without; `weights` is that of the weights file."""
    drawn = [module.projection.detach().cpu().float() for module in model.modules() if isinstance(module, Favor)]
    features = hashlib.sha256(b"".join(rows.numpy().tobytes() for rows in drawn)).hexdigest() if drawn else "none"
    return {"tokenizer": tokenizer.hash, "features": features, "model": weights}


def save(
    path: Path,
    session: Session,
    model: LanguageModel,
    belongs: dict[str, str],
    tokenizer: Tokenizer,
    run: str,
    more: Mapping[str, Any] = NOTHING_MORE,
    durable: bool = True,
) -> None:
    """Write the session of one text, to a temporary file first, so that the file is whole or absent, even where the
    power fails if it is `durable`; `more` is told by `describe` beside what every file tells."""
    if len(session.last) != 1:
        raise UsageError(
            f"{path}: a state file holds one text, this session has {len(session.last)}. Write one at a time."
        )
    if path.exists() and not path.is_file():
        raise UsageError(f"{path}: no file, and cannot be replaced by one. Choose another name.")
    about = {"format": FORMAT, "run": run, "tokens": int(session.total), "tail": tail_of(session, tokenizer), **belongs}
    about |= more
    session = session._replace(state=model.settle(session.state))
    kept = {name: tensor.detach().cpu().contiguous() for name, tensor in _named(session)}
    kept = sparse.pack(kept, dict(_named(_empty(model))))
    staged = path.with_name(f".{path.name}.partial")
    with named(path):
        try:
            staged.touch(PRIVATE)
            save_tensors(kept, staged, {"lmlong": json.dumps({**about, "sha256": _digest(about, kept)})})
            staged.chmod(PRIVATE)
            if durable:
                fsync(staged)
            staged.replace(path)
        finally:
            with suppress(OSError):
                staged.unlink()


def load(path: Path, model: LanguageModel, belongs: dict[str, str], run: str) -> Session:
    """Return the session in a file, or refuse it, naming the difference, where it is not this model's."""
    about = describe(path)
    refuse_other(path, about, belongs, run, "or read the text again by lmlong state build.")
    like = _empty(model)
    wanted, found = dict(_named(like)), _verified(path, about)
    try:
        found = sparse.unpack(found, wanted)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error} is not what this model remembers. Read the text again.") from None
    if not found.keys() & _unread_names(wanted):  # all was read, when sessions left nothing unread
        found |= {name: wanted[name] for name in _unread_names(wanted)}
    for name in [*wanted, *(found.keys() - wanted.keys())]:
        if not _alike(wanted.get(name), found.get(name)):
            raise CheckpointError(f"{path}: {name} is not what this model remembers. Read the text again.")
        if not found[name].isfinite().all():
            raise CheckpointError(f"{path}: {name} has values that are no finite numbers. Read the text again.")
    device = model.embedding.weight.device
    # sums keep their precision, and are widened where the model needs it
    precise = (torch.promote_types(found[name].dtype, tensor.dtype) for name, tensor in wanted.items())
    session = rebuild_state(
        like, iter([found[name].to(device, dtype) for name, dtype in zip(wanted, precise, strict=True)])
    )
    if not 0 <= int(session.last) < model.embedding.num_embeddings:
        raise CheckpointError(f"{path}: its last token is none that this model knows. Read the text again.")
    try:
        unread = session.unread.row(0)
        unread.text()
    except ValueError:
        raise CheckpointError(f"{path}: its unread text is none. Read the text again.") from None
    if any(token >= model.embedding.num_embeddings or token < 0 for token in unread.chosen):
        raise CheckpointError(f"{path}: unread tokens that this model does not know. Read the text again.")
    return session


def refuse_other(path: Path, about: Mapping[str, Any], belongs: dict[str, str], run: str, remedy: str) -> None:
    """Refuse what was made with another model, naming the difference."""
    for key, meaning in OWNERS.items():
        if about.get(key) != belongs[key]:
            raise CheckpointError(
                f"{path}: made with another {meaning} ({str(about.get(key))[:12]}) than that of {run} "
                f"({belongs[key][:12]}). Use it with {about.get('run')}, {remedy}"
            )


def describe(path: Path) -> dict[str, Any]:
    """Return the model and the text of the session in a file."""
    try:
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
            f"{path}: no state file of lmlong, or damaged. Make one by lmlong state build."
        ) from error


def _verified(path: Path, about: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a file, every bit of which must be as it was saved."""
    found = load_file(path)
    if about["sha256"] != _digest({name: value for name, value in about.items() if name != "sha256"}, found):
        raise CheckpointError(f"{path}: not what was saved (its sha256 differs). Read the text again.")
    return found


def _digest(about: dict[str, Any], kept: dict[str, Tensor]) -> str:
    """Return the sha256 of a file's metadata and tensors."""
    return hashlib.sha256(json.dumps(about).encode() + serialized(kept)).hexdigest()


def tail_of(session: Session, tokenizer: Tokenizer) -> str:
    """Return the end of the text."""
    tokens = [token for token in session.recent[0].tolist() if token != NO_TOKEN]
    data = tokenizer.decode_bytes(tokens) + session.unread.row(0).pending
    return data.decode("utf-8", LOSSLESS)[-TAIL:]


def _empty(model: LanguageModel) -> Session:
    """Return an empty session, whose tensors have the shapes of any other except where a state grows."""
    device = model.embedding.weight.device
    token = torch.zeros(1, dtype=torch.long, device=device)
    nothing = as_tensors(UnreadText(), device)
    return Session(model.init_state(1), token, token.new_zeros(1, RECENT), token, nothing)


def _unread_names(named: dict[str, Tensor]) -> set[str]:
    return {name for name in named if name.startswith("unread.")}


def _alike(wanted: Tensor | None, found: Tensor | None) -> bool:
    """Return whether a tensor fits another: its dtype matches, and its shape where that does not grow."""
    if wanted is None or found is None:
        return False
    same_dtype = wanted.dtype == found.dtype or {wanted.dtype, found.dtype} <= PRECISE
    return same_dtype and fits_shape(found, wanted)


def _named(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Iterate over the tensors in nested tuples with their paths, such as state.blocks.0.attention.S."""
    if isinstance(value, Tensor):
        yield name, value
    elif value is not None:
        for key, part in zip(getattr(value, "_fields", range(len(value))), value, strict=True):
            yield from _named(part, f"{name}.{key}" if name else str(key))
