"""Results kept in files, each named by the hash of all its settings."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lmlong import __version__
from lmlong.errors import UsageError
from lmlong.io.cache import key_of
from lmlong.io.files import atomic_write, read_checksummed, with_checksum
from lmlong.model.device import describe_machine, pick_device


class KeptResult:
    """The file of one result below `out`, which contains the settings; its name ends in their hash."""

    def __init__(self, out: Path, label: str, settings: dict[str, Any]):
        device = pick_device("auto")
        by = {
            "lmlong": __version__,
            "torch": torch.__version__,
            "machine": describe_machine(device),
        }
        self.settings = json.loads(json.dumps({**settings, "by": by}))
        self.name = f"{label}-{key_of(self.settings)[:12]}"
        self.file = out / f"{self.name}.json"
        self.folder = out / self.name
        """A folder for other files of the same experiment."""

    def get(self, make: Callable[[], Any]) -> Any:
        """Return the kept result, or that of `make`, as JSON values."""
        if (kept := self._read()) is not None:
            return kept["result"]
        try:  # before hours are spent on a result that cannot be kept
            self.file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"{self.file.parent}: results cannot be kept here ({error.strerror}). Name another folder."
            ) from None
        text = with_checksum({"settings": self.settings, "result": make()})
        atomic_write(self.file, text)
        return json.loads(text)["result"]

    def _read(self) -> dict[str, Any] | None:
        try:
            kept = read_checksummed(self.file.read_bytes())
        except (OSError, ValueError):
            return None
        return kept if kept.get("settings") == self.settings else None
