"""Add prebuilt native code to a wheel, if tools/release asks for it. Other builds of the package compile nothing."""

import os
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = "LMLONG_PREBUILT"
"""Environment variable: a folder of libraries by level, named by the platform tag of the wheel."""


class PrebuiltCode(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        folder = os.environ.get(FOLDER)
        if folder and version != "editable":
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{Path(folder).name}"
            build_data["force_include"][folder] = "lmlong/native/prebuilt"
