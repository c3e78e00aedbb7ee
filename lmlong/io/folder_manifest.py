"""The manifest of a folder: the name and version of its format, and the size and sha256 of each file.

It ends with a sha256 of itself, so any changed bit is detected. A folder without a manifest is incomplete.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from lmlong.errors import other_format
from lmlong.io.files import fsync, parse_json, read_checksummed, sha256, with_checksum

NAME = "manifest.json"
MAX_SIZE = 1 << 20
"""Maximum bytes of a manifest. A larger file is not read."""


class Format(NamedTuple):
    """The name and version of a folder's format. Raise the version when the files, or how they are made, change."""

    kind: str
    version: int
    again: str = "Make it again"
    """The remedy for an older version."""


class DamagedFolder(Exception):
    """A folder does not match its manifest, or the manifest is invalid. The message names the file."""


class FolderManifest(NamedTuple):
    """The content of a manifest."""

    files: dict[str, dict[str, Any]]  # name -> bytes, sha256
    about: dict[str, Any]  # further plain values of the writer


def seal(folder: Path, form: Format, about: dict[str, Any]) -> None:
    """Write the manifest of the files in a folder, and flush all of them to disk."""
    files = sorted(folder.iterdir())
    for path in files:
        fsync(path)
    (folder / NAME).write_bytes(manifest_text(folder, form, about).encode())
    mode = (folder / NAME).stat().st_mode
    for path in files:
        path.chmod(mode)  # some libraries write files that only their owner can read, whatever the umask
    fsync(folder / NAME)
    fsync(folder)


def manifest_text(folder: Path, form: Format, about: dict[str, Any]) -> str:
    """Return the manifest of a folder's present files, as JSON."""
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in sorted(folder.iterdir())
        if path.name != NAME
    }
    return with_checksum({"lmlong": form.kind, "format": form.version, **about, "files": files})


def has_digest(path: Path, digest: str) -> bool:
    return sha256(path) == digest


def verify(
    folder: Path, form: Format, names: Iterable[str] | None = None, check: Callable[[Path, str], bool] = has_digest
) -> FolderManifest:
    """Return the manifest of a folder. Raise DamagedFolder unless these files (by default all) match it."""
    manifest = read_manifest(folder, form)
    for name in manifest.files if names is None else names:
        if name not in manifest.files:
            raise DamagedFolder(f"{folder / name}: not listed in the {form.kind}'s {NAME}.")
        path, entry = folder / name, manifest.files[name]
        if not path.is_file() or path.is_symlink():
            raise DamagedFolder(f"{path}: missing, though {NAME} lists it.")
        if path.stat().st_size != entry["bytes"] or not check(path, entry["sha256"]):
            raise DamagedFolder(f"{path}: not what was saved (its sha256 differs from {NAME}).")
    return manifest


def read_manifest(folder: Path, form: Format) -> FolderManifest:
    """Return the manifest of a folder. Does not check the files that it lists."""
    path = folder / NAME
    if not path.is_file():
        raise DamagedFolder(f"{folder}: the {form.kind}'s {NAME} is missing.")
    if path.stat().st_size > MAX_SIZE:
        raise DamagedFolder(f"{path}: too large for a manifest.")
    text = path.read_bytes()
    try:
        version = parse_json(text)["format"]
        if type(version) is int and version != form.version:
            raise DamagedFolder(other_format(path, version, form.version, form.again))
        content = read_checksummed(text)
        files = content.pop("files")
        is_valid = (content.pop("lmlong"), content.pop("format")) == form[:2]
        if not is_valid or not all(_is_file_entry(name, entry) for name, entry in files.items()):
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DamagedFolder(f"{path}: damaged.") from None
    return FolderManifest(files, content)


def _is_file_entry(name: str, entry: Any) -> bool:
    """Return whether an entry names a file within the folder, its size and its digest."""
    types = {key: type(value) for key, value in entry.items()}
    return Path(name).name == name and name not in ("..", NAME) and types == {"bytes": int, "sha256": str}
