"""Results that took long are kept, each by everything that made it, so that none is ever taken for another."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lmlong import __version__
from lmlong.bench.cost import machine
from lmlong.errors import UsageError
from lmlong.io.cache import key_of
from lmlong.io.files import flush, read_signed, signed
from lmlong.model.device import pick_device


class Kept:
    """The place of one result below `out`: a file whose name ends in a hash of the settings, and holds them too."""

    def __init__(self, out: Path, label: str, settings: dict[str, Any]):
        device = pick_device("auto")
        by = {
            "lmlong": __version__,
            "torch": torch.__version__,
            "machine": machine(device),
        }
        self.settings = json.loads(json.dumps({**settings, "by": by}))
        self.name = f"{label}-{key_of(self.settings)[:12]}"
        self.file = out / f"{self.name}.json"
        self.folder = out / self.name
        """For what else the result is made from."""

    def get(self, make: Callable[[], Any]) -> Any:
        """The result in plain values: as it is kept, or made now."""
        if (known := self._read()) is not None:
            return known["result"]
        try:  # before hours are spent on what could not be kept
            self.file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{self.file.parent}: no place for results ({error.strerror}). Name another.") from None
        text = signed({"settings": self.settings, "result": make()})
        staged = self.file.with_name(f".{self.file.name}.partial")
        staged.write_text(text, encoding="utf-8")
        flush(staged)
        staged.replace(self.file)
        return json.loads(text)["result"]

    def _read(self) -> dict[str, Any] | None:
        try:
            known = read_signed(self.file.read_bytes())
        except (OSError, ValueError):
            return None
        return known if known.get("settings") == self.settings else None
