"""Imports go down the floors of the package only and in no circle; third-party libraries stay where they belong."""

import ast
import shutil
from collections.abc import Container, Iterator, Sequence
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
    {"model"},
    {"decode"},
    {"testing"},
    {"checkpoint"},
    {"interop"},
    {"training", "inference"},
    {"evaluation", "bench", "surprisal"},
    {"serving"},
    {"cli"},
    {"lmlong"},  # the package itself and `python -m lmlong` stand on top of everything
]
LEVEL = {unit: level for level, units in enumerate(FLOORS) for unit in units}

ONLY_IN = {
    "sentencepiece": "data",
    "datasets": "data",
    "huggingface_hub": "data",
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


PRIVATE = {
    "._forward_hooks": "torch lists the hooks of a module nowhere else, and native code refuses them",
    "._forward_pre_hooks": "the same",
    "torch._dynamo.config": "torch.compiler has no limit of compilations",
    "torch._dynamo.maybe_mark_dynamic": "the public mark_dynamic fails where a size is constant",
    "torch._foreach_lerp": "the only fused interpolation of many tensors",
    "torch._inductor.config": "the documented place of its options",
    "torch._subclasses.fake_tensor.FakeTensorMode": "tensors without values; the meta device has no autocast",
    "torch.utils._python_dispatch.TorchDispatchMode": "the documented class to see every operation",
}
"""Every private name of torch, Lightning and DeepSpeed that is used, and why."""


def private_names(trees: Sequence[ast.Module]) -> set[str]:
    """The private names of torch, Lightning and DeepSpeed in some files, as written; `._name` is an attribute that no
    file defines, so one of a library's objects."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    imported = {
        f"{node.module}.{each.name}" for node in nodes if isinstance(node, ast.ImportFrom) for each in node.names
    }
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    names = {name for name in imported | set(map(ast.unparse, attributes)) if any(map(is_private, name.split(".")))}
    defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    defined |= {node.attr for node in attributes if isinstance(node.ctx, ast.Store)}
    defined |= {node.id for node in nodes if isinstance(node, ast.Name)}
    return {name for name in names if name.split(".")[0] in ("torch", "lightning", "deepspeed")} | {
        f".{node.attr}"
        for node in attributes
        if is_private(node.attr) and node.attr not in defined and ast.unparse(node.value) not in ("torch", "os")
    }


def is_private(name: str) -> bool:
    return (
        name.startswith("_") and not name.startswith("__") and name not in ("_asdict", "_fields", "_make", "_replace")
    )


def test_private_names_of_libraries_have_a_reason() -> None:
    used = private_names([ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")])
    assert {known for known in PRIVATE if known in used} == PRIVATE.keys()
    assert [
        name for name in used if not any(known.startswith(name) or name.startswith(known) for known in PRIVATE)
    ] == []


def test_package_keeps_to_its_floors() -> None:
    assert violations(PACKAGE) == []


@pytest.mark.parametrize("name", sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py")))
def test_package_has_no_import_cycle(name: str) -> None:
    assert circle(PACKAGE / name) == []


def test_planted_cycle_is_reported(tmp_path: Path) -> None:
    copy = shutil.copytree(PACKAGE / "recipe", tmp_path / "lmlong" / "recipe")
    with (copy / "lengths.py").open("a", encoding="utf-8") as planted:
        planted.write("\nif TYPE_CHECKING:\n    import lmlong.recipe.file")
    assert "lmlong.recipe.lengths" in circle(copy)


@pytest.mark.parametrize(
    ("file", "source", "complaint"),
    [
        ("model/a.py", "from lmlong import training", "model/a.py:1: model imports upwards training"),
        ("data/a.py", "from ..cli.main import main", "data/a.py:1: data imports upwards cli"),
        ("errors.py", "def late():\n    import lmlong.recipe", "errors.py:2: errors imports upwards recipe"),
        ("recipe/a.py", "from lmlong import load", "recipe/a.py:1: recipe imports upwards lmlong"),
        ("bench/a/b.py", "from ...evaluation import x", "bench/a/b.py:1: bench imports its sibling evaluation"),
        ("data/a.py", "from torch import nn", "data/a.py:1: data imports torch"),
        ("model/a.py", "import lightning.pytorch", "model/a.py:1: only training imports lightning"),
        ("misc.py", "", "misc.py: stands on no floor"),
    ],
)
def test_planted_import_is_reported(tmp_path: Path, file: str, source: str, complaint: str) -> None:
    planted = tmp_path / file
    planted.parent.mkdir(parents=True, exist_ok=True)
    planted.write_text(source)
    assert violations(tmp_path) == [complaint]
