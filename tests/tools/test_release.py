"""What is published is complete and has nothing else."""

import re
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from machine import needs_compiler
from release_parts import distributions
from release_parts.native_code import LIBRARIES, compile_levels
from release_parts.notes import release_notes

import lmlong
from lmlong.errors import LmlongError
from lmlong.native.prebuilt import FOLDER, library_path

PACKAGE = Path(lmlong.__file__).parent


def test_every_library_of_the_package_is_prebuilt() -> None:
    """Each module that loads native code, but the one for all scans, makes the code of one library."""
    modules = [path for path in PACKAGE.rglob("*.py") if re.search(r"\bload(_scan|_step)?\(code\(\)", path.read_text())]
    assert len(modules) == len({code().key() for code in LIBRARIES.values()}) == len(LIBRARIES)
    assert {code().folder for code in LIBRARIES.values()} == {path.parent for path in PACKAGE.rglob("*.cpp")}


def test_release_notes_are_the_newest_section() -> None:
    version = lmlong.__version__
    assert release_notes(f"# Changelog\n\n## {version} (today)\n\n- new\n\n## 0.0.1\n\n- old\n") == "- new\n"
    with pytest.raises(LmlongError, match=r"CHANGELOG\.md begins with 99\.0, and the version is"):
        release_notes("# Changelog\n\n## 99.0\n\n- new\n")
    assert release_notes((distributions.ROOT / "CHANGELOG.md").read_text())


def wheel(path: Path, names: set[str]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, "")
    return path


def test_wheel_with_other_files_is_refused(tmp_path: Path) -> None:
    names = {*distributions.tracked("lmlong"), *(f"lmlong/{name}" for name in distributions.tracked("recipes"))}
    whole = {*names, "lmlong-0.1.0.dist-info/METADATA"}
    path = tmp_path / "lmlong-0.1.0-py3-none-any.whl"
    distributions.check_wheel(wheel(path, whole), None)
    for names, complaint in (
        (whole | {"tests/test_public.py"}, r"tests/test_public\.py is stray"),
        (whole - {"lmlong/py.typed"}, r"lmlong/py\.typed is missing"),
        (whole | {"lmlong/native/prebuilt/x86-64-v3/0.so"}, r"0\.so is stray"),
    ):
        with pytest.raises(LmlongError, match=complaint):
            distributions.check_wheel(wheel(path, names), None)
    with pytest.raises(LmlongError, match=r"lmlong/native/prebuilt/x86-64-v\S+\.so is missing"):
        distributions.check_wheel(wheel(path, whole), "x86_64")


@pytest.mark.slow
@needs_compiler
@pytest.mark.skipif(find_spec("build") is None, reason="needs pip install -e '.[release]', and the network")
def test_wheel_contains_native_code(tmp_path: Path) -> None:
    folder = tmp_path / "manylinux_2_27_x86_64"
    assert len(list(compile_levels(folder, ["x86-64-v3"]))) == len(LIBRARIES)
    built = distributions.build("wheel", distributions.ROOT, tmp_path / "dist", folder)
    assert built.name == f"lmlong-{lmlong.__version__}-py3-none-{folder.name}.whl"
    expected = {library_path(FOLDER, "x86-64-v3", code()).relative_to(PACKAGE) for code in LIBRARIES.values()}
    with zipfile.ZipFile(built) as archive:
        assert {name for name in archive.namelist() if name.endswith(".so")} == {f"lmlong/{name}" for name in expected}
    plain = distributions.build("wheel", distributions.ROOT, tmp_path / "dist")
    distributions.check_wheel(plain, None)
    assert plain.name.endswith("-py3-none-any.whl")
