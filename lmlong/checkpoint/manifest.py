"""The manifest of a checkpoint: the size and sha256 of each of its files. A folder without one is not a checkpoint."""

import hashlib
import json
from pathlib import Path

from lmlong.errors import CheckpointError

NAME = "manifest.json"
LARGEST = 1 << 20
"""Bytes beyond which a manifest is not one of ours, and is not read."""
FORMAT = 1


def make(folder: Path) -> str:
    """The manifest of the files that lie in a folder now, as JSON."""
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in sorted(folder.iterdir())
        if path.name != NAME
    }
    return json.dumps({"format": FORMAT, "files": files}, indent=2) + "\n"


def verify(folder: Path, *names: str) -> None:
    """Refuse the folder unless these files (all, when none is named) are what the manifest says."""
    files = _files(folder)
    for name in names or files:
        if name not in files:
            raise CheckpointError(f"{folder / name}: not part of the checkpoint, says its {NAME}.")
        path = folder / name
        if not path.is_file() or path.is_symlink():
            raise CheckpointError(f"{path}: missing, though {NAME} lists it. Use another checkpoint.")
        if path.stat().st_size != files[name]["bytes"] or sha256(path) != files[name]["sha256"]:
            raise CheckpointError(
                f"{path}: not what was saved (its sha256 differs from {NAME}). Use another checkpoint."
            )


def recorded(folder: Path, name: str) -> str:
    """The sha256 of a file as the manifest has it."""
    return _files(folder)[name]["sha256"]


def _files(folder: Path) -> dict[str, dict]:
    path = folder / NAME
    if not path.is_file():
        raise CheckpointError(f"{folder}: no checkpoint, it has no {NAME}.")
    if path.stat().st_size > LARGEST:
        raise CheckpointError(f"{path}: too large for a manifest. Use another checkpoint.")
    try:
        manifest = json.loads(path.read_bytes())
        found, files = manifest["format"], dict(manifest["files"])
        sound = all(
            isinstance(name, str) and isinstance(entry["bytes"], int) and isinstance(entry["sha256"], str)
            for name, entry in files.items()
        )
    except (ValueError, KeyError, TypeError):
        sound, found, files = False, FORMAT, {}
    if found != FORMAT:
        raise CheckpointError(f"{path}: format {found!r}; this version of lmlong reads format {FORMAT}.")
    # a name must never lead out of the folder
    if not sound or any(Path(name).name != name or name == ".." for name in files):
        raise CheckpointError(f"{path}: damaged. Use another checkpoint.")
    return files


def sha256(path: Path) -> str:
    """The sha256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
