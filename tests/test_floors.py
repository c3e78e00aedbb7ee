"""Imports go down the floors of the package only and in no circle; third-party libraries stay where they belong."""

import ast
import shutil
import sys
from collections.abc import Container, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import lmlong

PACKAGE = Path(lmlong.__file__).parent

FLOORS = [
    {"errors"},
    {"io"},
    {"recipe", "report", "native"},
    {"data", "attention"},
    {"model", "testing"},
    {"checkpoint"},
    {"interop"},
    {"training", "inference"},
    {"evaluation", "experiments", "bench", "surprisal"},
    {"serving"},
    {"cli"},
    {"lmlong"},  # the package itself and `python -m lmlong` stand on top of everything
]
LEVEL = {unit: level for level, units in enumerate(FLOORS) for unit in units}

ONLY_IN = {
    "sentencepiece": "data",
    "datasets": "data",
    "lightning": "training",
    "deepspeed": "training",
    "lm_eval": "evaluation",
    "click": "cli",
    "starlette": "serving",
    "uvicorn": "serving",
    "prometheus_client": "serving",
    "matplotlib": "report",
}
TORCHLESS = {"errors", "io", "recipe", "report", "data"}
ACYCLIC = {
    "attention",
    "bench",
    "checkpoint",
    "cli",
    "data",
    "evaluation",
    "experiments",
    "inference",
    "interop",
    "io",
    "model",
    "native",
    "recipe",
    "report",
    "serving",
    "surprisal",
    "training",
}
"""Packages whose modules import each other in no circle; add a package once it has none, and remove none."""


def violations(package: Path) -> list[str]:
    """Every import in a package that breaks a rule, as 'file:line: what is wrong'."""
    found = []
    for file in sorted(package.rglob("*.py")):
        inside = file.relative_to(package)
        unit = unit_of(list(inside.with_suffix("").parts))
        if unit not in LEVEL:
            found.append(f"{inside}: stands on no floor")
            continue
        for line, name in imports(file, package):
            if problem := verdict(unit, name.split(".")):
                found.append(f"{inside}:{line}: {problem}")
    return found


def unit_of(parts: list[str]) -> str:
    """The unit of the floors that a module belongs to, by its path below the package."""
    if not parts or parts[0] in ("__init__", "__main__"):
        return "lmlong"
    return parts[0]


def imports(file: Path, package: Path) -> Iterator[tuple[int, str]]:
    """Line and absolute name of every import, those inside functions and relative ones too."""
    here = ["lmlong", *file.relative_to(package).parts[:-1]]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = here[: len(here) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{source}.{alias.name}") for alias in node.names)


def verdict(unit: str, name: list[str]) -> str:
    """What is wrong with a unit importing a name, or nothing."""
    library = name[0]
    if library == "torch" and unit in TORCHLESS:
        return f"{unit} imports torch"
    if ONLY_IN.get(library, unit) != unit:
        return f"only {ONLY_IN[library]} imports {library}"
    if library != "lmlong" or name[1:] == ["__version__"]:
        return ""
    target = unit_of(name[1:] if name[1:] and unit_of(name[1:2]) in LEVEL else [])
    if target == unit or LEVEL[target] < LEVEL[unit]:
        return ""
    direction = "its sibling" if LEVEL[target] == LEVEL[unit] else "upwards"
    return f"{unit} imports {direction} {target}"


def circle(folder: Path) -> list[str]:
    """Return the modules of one circle of imports in a package, the first one twice, or nothing.

    Imports inside functions and those for type checking alone count too.
    """
    files = {name_of(file, folder.parent): file for file in folder.rglob("*.py")}
    graph = {
        name: {module for _, imported in imports(file, folder.parent) if (module := nearest(imported, files)) != name}
        for name, file in files.items()
    }
    try:
        TopologicalSorter({name: within - {""} for name, within in graph.items()}).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def name_of(file: Path, package: Path) -> str:
    """The absolute name of the module in a file."""
    parts = ["lmlong", *file.relative_to(package).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def nearest(imported: str, modules: Container[str]) -> str:
    """The module that an imported name is defined in, or an empty string if it is none of these modules."""
    while imported and imported not in modules:
        imported = imported.rpartition(".")[0]
    return imported


def test_the_package_keeps_to_its_floors() -> None:
    assert violations(PACKAGE) == []


@pytest.mark.parametrize("name", sorted(ACYCLIC))
def test_modules_import_each_other_in_no_circle(name: str) -> None:
    assert circle(PACKAGE / name) == []


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("yaml.py", "from lmlong.recipe import section"),
        ("yaml.py", "from .mistakes import mistakes"),
        ("bounds.py", "def late():\n    from lmlong.recipe import Recipe"),
        ("lengths.py", "if TYPE_CHECKING:\n    import lmlong.recipe.file"),
    ],
)
def test_a_planted_circle_is_reported(copied: Path, file: str, source: str) -> None:
    planted = copied / "recipe" / file
    planted.write_text(planted.read_text(encoding="utf-8") + "\n" + source)
    assert f"lmlong.recipe.{planted.stem}" in circle(copied / "recipe")


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    copy = tmp_path / "lmlong"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


@pytest.mark.parametrize(
    ("file", "source", "complaint"),
    [
        ("model/planted.py", "import lmlong.training.module", "model/planted.py:1: model imports upwards training"),
        ("model/planted.py", "from lmlong import training", "model/planted.py:1: model imports upwards training"),
        ("data/planted.py", "from ..cli.main import main", "data/planted.py:1: data imports upwards cli"),
        ("data/planted.py", "from .. import inference", "data/planted.py:1: data imports upwards inference"),
        (
            "errors.py",
            "def late():\n    from lmlong.recipe import Recipe",
            "errors.py:2: errors imports upwards recipe",
        ),
        ("recipe/planted.py", "from lmlong import load", "recipe/planted.py:1: recipe imports upwards lmlong"),
        ("data/planted.py", "import lmlong.attention", "data/planted.py:1: data imports its sibling attention"),
        ("bench/a/b.py", "from ...evaluation import x", "bench/a/b.py:1: bench imports its sibling evaluation"),
        ("recipe/section.py", "import torch", "recipe/section.py:1: recipe imports torch"),
        ("data/planted.py", "from torch import nn", "data/planted.py:1: data imports torch"),
        ("model/planted.py", "import lightning.pytorch", "model/planted.py:1: only training imports lightning"),
        ("training/planted.py", "from datasets import x", "training/planted.py:1: only data imports datasets"),
        ("inference/planted.py", "import click", "inference/planted.py:1: only cli imports click"),
        ("misc.py", "", "misc.py: stands on no floor"),
    ],
)
def test_a_planted_import_is_reported(copied: Path, file: str, source: str, complaint: str) -> None:
    planted = copied / file
    planted.parent.mkdir(parents=True, exist_ok=True)
    planted.write_text(source)
    assert complaint in violations(copied)


@pytest.mark.parametrize(
    "source", ["from lmlong import __version__", "from .loss import x", "import lmlong.recipe.file"]
)
def test_an_import_that_goes_down_is_no_violation(copied: Path, source: str) -> None:
    (copied / "model" / "planted.py").write_text(source)
    assert not [problem for problem in violations(copied) if "planted" in problem]


def test_importing_the_package_costs_nothing() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    imported = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in tree.body if isinstance(node, ast.ImportFrom)}
    light = {"lmlong.errors", *sys.stdlib_module_names}
    assert {name for name in imported if name not in light and name.split(".")[0] not in light} == set()
