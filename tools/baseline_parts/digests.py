"""The digest of nested values: tensors by their bytes, all else by how Python writes it."""

import json
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file

from baseline_parts.workspace import Workspace
from lmlong.checkpoint import read

SHORT = 16
"""Hexadecimal digits that are kept of a digest."""


class Case(NamedTuple):
    """A named computation and the values whose bits must not change."""

    name: str
    values: Callable[[Workspace], Mapping[str, Any]]


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Iterate over the parts of nested dicts, lists and tuples with their paths, dicts in the order of their keys."""
    if isinstance(value, Mapping):
        for key in sorted(value):
            yield from leaves(value[key], f"{path}/{key}")
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield from leaves(part, f"{path}/{number}")
    else:
        yield path, value


def leaf_digest(value: Any) -> str:
    """Return the digest of a tensor with its dtype and shape, of an array, or of a plain value."""
    if isinstance(value, torch.Tensor):
        value = value.detach().contiguous()
        kind, data = f"{value.dtype} {tuple(value.shape)}", value.reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, np.ndarray):
        kind, data = f"{value.dtype} {value.shape}", np.ascontiguousarray(value).tobytes()
    else:
        assert value is None or isinstance(value, str | int | float), type(value)
        kind, data = type(value).__name__, repr(value).encode()
    return sha256(kind.encode() + b"\0" + data).hexdigest()[:SHORT]


def parts(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the digest of each part of nested values, by its path."""
    return {path: leaf_digest(value) for path, value in leaves(values)}


def digest(of_parts: Mapping[str, str]) -> str:
    """Return one digest of the digests of all parts."""
    return sha256(json.dumps(of_parts, sort_keys=True).encode()).hexdigest()[:SHORT]


KEPT = ("step", "loss", "gradient_norm", "learning_rate", "validation", "final_validation", "state", "sample", "event")
"""The keys of metrics.jsonl that are the same in every run; the others are times."""


def of_run(run: Path) -> dict[str, Any]:
    """Return the metrics and the newest weights of a run folder."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    metrics = [{key: line[key] for key in KEPT if key in line} for line in lines]
    return {"metrics": metrics, "weights": load_file(read.find(run) / "model.safetensors")}
