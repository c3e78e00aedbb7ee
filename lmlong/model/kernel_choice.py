"""`kernel: auto`: on a GPU, the fastest kernel of each kind of attention that agrees with torch.

A choice depends on the GPU, the number format, the versions of the kernels' packages and the shape of the work. It is
stored in the cache and, for training, in checkpoints.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lmlong.attention.base import CausalAttention
from lmlong.attention.device_policy import policy_of
from lmlong.attention.inputs import Gate
from lmlong.io.cache import cache_folder, key_of
from lmlong.io.files import atomic_write, parse_json, read_ordinary
from lmlong.model.device import describe_machine
from lmlong.model.kernel_trial import BrokenDeviceError, TrialResult, Work, try_kernels
from lmlong.model.language_model import LanguageModel

PACKAGES = ("torch", "triton", "fla-core", "lmlong")

GAIN = 1.05
"""How many times as fast as torch a kernel must be to replace it. A kernel that hands its work over to torch is not."""

BY_NAME, DEFAULT = "training.kernel", "the default of a CPU"
"""What chose a kernel that was not chosen by a trial."""

LONGEST_REASON = 1000
"""Characters of the reason in a valid entry of the cache."""


class KernelChoice(NamedTuple):
    """The kernels of a model, and what chose them."""

    names: Mapping[str, str]
    """The kernel of each kind of attention."""
    chosen_by: str
    """The device, number format and versions of a trial, BY_NAME, or DEFAULT."""

    @classmethod
    def read(cls, value: object) -> "KernelChoice | None":
        """Return a choice from plain values in a file; None unless they are valid."""
        if not isinstance(value, dict) or value.keys() != set(cls._fields):
            return None
        names, chosen_by = value["names"], value["chosen_by"]
        if not isinstance(names, dict) or not all(_is_text(text) for text in (chosen_by, *names, *names.values())):
            return None
        return cls(names, chosen_by)


class Decision(NamedTuple):
    """A choice with its reasons."""

    choice: KernelChoice
    reasons: Mapping[str, str]
    """The reason for the kernel of each kind; empty if none was chosen by a trial."""
    tried: bool = False
    """Whether kernels were tried now."""

    def line(self, known: KernelChoice | None = None) -> str:
        """Return the kernels and the reasons as a line, with those of a checkpoint if they were others; empty if there
        is nothing to report."""
        names = self.choice.names
        changed = known and known.names != names and BY_NAME not in (known.chosen_by, self.choice.chosen_by)
        if not names or not (self.reasons or changed):
            return ""
        why = {kind: f" ({self.reasons[kind]})" if kind in self.reasons else "" for kind in names}
        line = "kernel: " + "; ".join(f"{kind} by {name}{why[kind]}" for kind, name in names.items())
        return f"{line}; the checkpoint has {_in_words(known)}" if known and changed else line


class _Entry(NamedTuple):
    """An entry of the cache."""

    kernel: str
    reason: str


def choose_kernels(
    model: LanguageModel, work: Work, device: torch.device, known: KernelChoice | None = None
) -> Decision:
    """Choose the kernel of each kind of attention in a model for its work on a device.

    The choice of a checkpoint, `known`, is kept if it was made on the same device with the same versions. Otherwise the
    cache has the choice, or kernels are tried. A kernel set by name is kept, and so is native code on a CPU.
    """
    if model.kernel_is_set or not policy_of(device).tries_kernels:
        return Decision(KernelChoice(model.kernel_names, BY_NAME if model.kernel_is_set else DEFAULT), {})
    entries, tried = {}, False
    for kind, (attention, *_) in model.with_kernels.items():
        usable, file, entry = _look_up(kind, attention, work, device, known)
        if entry is None:
            entry, tried = _try(attention, usable, work, device, file), True
        entries[kind] = entry
    names, reasons = ({kind: entry[at] for kind, entry in entries.items()} for at in (0, 1))
    return Decision(KernelChoice(names, describe_environment(device, work.precision)), reasons, tried)


def kernels_here(
    model: LanguageModel, work: Work, device: torch.device, known: KernelChoice | None = None
) -> dict[str, str | None]:
    """Return the kernel that `choose_kernels` would choose for each kind of attention; None if by a trial."""
    attentions = {kind: attention for kind, (attention, *_) in model.with_kernels.items()}
    if not policy_of(device).tries_kernels:
        return {kind: "native" if "native" in _usable(one, device) else "torch" for kind, one in attentions.items()}
    entries = {kind: _look_up(kind, one, work, device, known)[2] for kind, one in attentions.items()}
    return {kind: entry and entry.kernel for kind, entry in entries.items()}


def _look_up(
    kind: str, attention: CausalAttention, work: Work, device: torch.device, known: KernelChoice | None
) -> tuple[list[str], Path, _Entry | None]:
    """Return the kernels that can compute an attention, where the cache has the choice among them, and the choice; None
    if it needs a trial."""
    environment, usable = describe_environment(device, work.precision), _usable(attention, device)
    file = _cache_file(attention, work, environment, usable)
    if len(usable) == 1:
        return usable, file, _Entry(usable[0], "no other kernel can be used here")
    if known and known.chosen_by == environment and (name := known.names.get(kind)) in usable:
        return usable, file, _Entry(str(name), "as in the checkpoint")
    return usable, file, _read_entry(file, usable)


def _usable(attention: CausalAttention, device: torch.device) -> list[str]:
    """Return the kernels that can compute an attention on a device, torch first."""
    usable = [name for name, why in attention.kernel_reasons(device).items() if why is None]
    return sorted(usable, key=lambda name: name != "torch")


def describe_environment(device: torch.device, precision: str) -> str:
    """Return what decides whether a choice is still valid: the device, the number format and the versions."""
    return ", ".join((describe_machine(device), f"precision {precision}", *_versions()))


def _versions() -> list[str]:
    versions = []
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions.append(f"{package} {version(package)}")
    return versions


def _try(attention: CausalAttention, usable: Sequence[str], work: Work, device: torch.device, file: Path) -> _Entry:
    """Try kernels, and store the result in the cache."""
    try:
        entry = _fastest(try_kernels(attention, usable, work, device))
    except BrokenDeviceError as error:
        _write_entry(file, _Entry("torch", f"another kernel fails: {error}"))
        raise
    _write_entry(file, entry)
    return entry


def _fastest(trials: Sequence[TrialResult]) -> _Entry:
    """Return the fastest kernel that agrees, with the results of all."""
    times = {trial.kernel: trial.seconds for trial in trials if trial.seconds is not None}
    best = min(times, key=times.__getitem__, default="torch")
    if "torch" in times and times[best] * GAIN > times["torch"]:
        best = "torch"
    own = [_milliseconds(times[best])] if best in times else []
    rest = [f"{name} {_milliseconds(seconds)}" for name, seconds in times.items() if name != best]
    refused = [f"{trial.kernel} {trial.refusal}" for trial in trials if trial.seconds is None]
    return _Entry(best, "; ".join((*own, *rest, *refused))[:LONGEST_REASON])


def _milliseconds(seconds: float) -> str:
    milliseconds = 1000 * seconds
    return f"{milliseconds:.3g} ms" if milliseconds < 100 else f"{milliseconds:,.0f} ms"


def _cache_file(attention: CausalAttention, work: Work, environment: str, usable: Sequence[str]) -> Path:
    heads = attention.heads, attention.kv_heads, attention.head_dim, attention.value_dim
    gates = {name: tuple(x.start.shape) for name, x in attention.inputs.items() if isinstance(x, Gate)}
    buffers = {name: tuple(x.shape) for name, x in attention.named_buffers()}
    sizes = heads, attention.state_numbers(tokens=1), gates, buffers
    key = key_of(environment, repr(attention), sizes, work, usable)
    return cache_folder() / "kernels" / f"{key}.json"


def _read_entry(file: Path, usable: Sequence[str]) -> _Entry | None:
    """Return an entry of the cache; None if it is missing or not valid."""
    try:
        value: Any = parse_json(read_ordinary(file))
        entry = _Entry(**value)
    except (OSError, ValueError, TypeError):
        return None
    return entry if entry.kernel in usable and _is_text(entry.reason) else None


def _write_entry(file: Path, entry: _Entry) -> None:
    with suppress(OSError):  # without a writable cache, kernels are tried each time
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(file, json.dumps(entry._asdict()) + "\n")


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= LONGEST_REASON and value.isprintable()


def _in_words(choice: KernelChoice) -> str:
    names = ", ".join(f"{kind} by {name}" for kind, name in choice.names.items())
    return f"{names} ({choice.chosen_by})"
