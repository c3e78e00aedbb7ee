#!/usr/bin/env python
"""Plant small faults in a copy of lmlong, one at a time, and report those that no test notices.

    tools/planted_faults.py map faults/map.db tests/attention tests/model
    tools/planted_faults.py plant faults/map.db faults/found.jsonl --faults 200 --seed 0

`map` runs tests once, and records which of them execute which line, except in processes that they start. Not as root,
who becomes an ordinary user in some tests, which then may not write to the map. It needs
`pip install pytest-cov`. `plant` draws faults in lines that tests execute. For each it runs those tests, until one
fails. Results are appended to a file, and a second call continues it. Exits 1 if a fault is not noticed.
"""

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
PLACES = ("attention", "model", "decode", "inference", "serving", "checkpoint", "training")
"""Packages in which faults are planted."""

SECONDS = 40
"""Time for the tests of a fault. Whether tests that take longer, or never end, would notice it is not decided."""

MOST_TESTS = 40
"""Tests that are tried for a fault, drawn at random among those that execute its line."""

SWAPPED: dict[type, type] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
"""The operator that replaces each operator."""


class Fault(NamedTuple):
    """A change of the code of one node."""

    file: str  # below the repository
    line: int
    start: int  # in the text of the file
    end: int
    before: str
    after: str

    @property
    def key(self) -> str:
        return f"{self.file}:{self.line}: {self.before} -> {self.after}"


def faults_in(file: Path) -> Iterator[Fault]:
    """Iterate over the faults that can be planted in a file."""
    text = file.read_text()
    begins = [0]
    for line in text.encode().splitlines(keepends=True):
        begins.append(begins[-1] + len(line))
    tree = ast.parse(text)
    in_strings = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    for node in (node for node in ast.walk(tree) if id(node) not in in_strings):
        for changed in _changed(node):
            start, end = (begins[line - 1] + column for line, column in _ends(node))
            before = text.encode()[start:end].decode()
            name = str(file.relative_to(ROOT))
            yield Fault(name, node.lineno, start, end, before, ast.unparse(changed))  # type: ignore[attr-defined]


def _ends(node: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def _changed(node: ast.AST) -> Iterator[ast.AST]:
    """Iterate over the wrong forms of a node."""
    match node:
        case ast.Compare(left, [operator], [right]):
            yield ast.Compare(left, [SWAPPED[type(operator)]()], [right])
        case ast.BinOp(left, operator, right) if type(operator) in SWAPPED:
            yield ast.BinOp(left, SWAPPED[type(operator)](), right)
        case ast.BoolOp(operator, values):
            yield ast.BoolOp(SWAPPED[type(operator)](), values)
        case ast.UnaryOp(ast.Not() | ast.USub() | ast.Invert(), operand):
            yield operand
        case ast.Constant(value) if type(value) is int:
            yield ast.Constant(value + 1)
        case ast.IfExp(test, body, orelse):
            yield ast.IfExp(test, orelse, body)
        case ast.Expr(ast.Call()) | ast.AugAssign() | ast.Raise():
            yield ast.Pass()


def draw(executed: dict[str, set[int]], count: int, seed: int) -> list[Fault]:
    """Draw faults in executed lines, as many in each file as its share of them."""
    possible = [
        fault
        for place in PLACES
        for file in sorted((ROOT / "lmlong" / place).rglob("*.py"))
        for fault in faults_in(file)
        if fault.line in executed.get(fault.file, ())
    ]
    return random.Random(seed).sample(possible, min(count, len(possible)))


class Map:
    """Which tests execute which lines."""

    def __init__(self, path: Path):
        from coverage import CoverageData

        self.data = CoverageData(str(path))
        self.data.read()
        self.paths = {str(Path(path).relative_to(ROOT)): path for path in self.data.measured_files()}

    def executed(self) -> dict[str, set[int]]:
        """Return the lines of each file that some test executes."""
        return {name: {line for line, tests in self.tests(name).items() if tests} for name in self.paths}

    def tests(self, name: str) -> dict[int, list[str]]:
        """Return the tests that execute each line of a file."""
        lines = self.data.contexts_by_lineno(self.paths[name])
        return {line: sorted({test.partition("|")[0] for test in tests if test}) for line, tests in lines.items()}


def plant(fault: Fault, tests: list[str], copy: Path) -> dict[str, Any]:
    """Plant a fault in a copy of the repository, and return what its tests report."""
    file, begun = copy / fault.file, time.monotonic()
    right = file.read_bytes()
    file.write_bytes(right[: fault.start] + fault.after.encode() + right[fault.end :])
    try:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", *tests]
        environment = os.environ | {"PYTHONPATH": str(copy)}
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=SECONDS, start_new_session=True
        )
        failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        noticed, by = done.returncode != 0, failed[0] if failed else f"exit {done.returncode}"
    except subprocess.TimeoutExpired:
        noticed, by = None, "no end"
    finally:
        file.write_bytes(right)
    result = {"fault": fault.key, "noticed": noticed, "by": by if noticed else None, "tests": len(tests)}
    return {**result, "seconds": round(time.monotonic() - begun, 1)}


def plant_all(options: argparse.Namespace) -> int:
    """Plant the faults that are not done yet, and print those that are not noticed."""
    covered, results = Map(options.map), []
    if options.found.exists():
        results = [json.loads(line) for line in options.found.read_text().splitlines()]
    done = {result["fault"] for result in results}
    with tempfile.TemporaryDirectory() as folder, options.found.open("a") as found:
        copy = Path(folder) / "lmlong"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", "runs", "__pycache__"))
        for fault in draw(covered.executed(), options.faults, options.seed):
            if fault.key not in done:
                tests = covered.tests(fault.file)[fault.line]
                tests = random.Random(fault.key).sample(tests, min(MOST_TESTS, len(tests)))
                results.append(plant(fault, tests, copy))
                found.write(json.dumps(results[-1]) + "\n")
                found.flush()
    missed = [result["fault"] for result in results if result["noticed"] is False]
    undecided = [result["fault"] for result in results if result["noticed"] is None]
    noticed = len(results) - len(missed) - len(undecided)
    print(*missed, f"{noticed} of {len(results)} faults noticed, {len(undecided)} not decided:", *undecided, sep="\n")
    return 1 if missed else 0


def map_tests(options: argparse.Namespace) -> int:
    """Run tests, and record which of them execute which line."""
    options.map.parent.mkdir(parents=True, exist_ok=True)
    words = ["-n", "1", "--cov=lmlong", "--cov-context=test", "--cov-report="]
    command = [sys.executable, "-m", "pytest", *words, *options.tests]
    return subprocess.run(command, cwd=ROOT, env=os.environ | {"COVERAGE_FILE": str(options.map.resolve())}).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    mapping = commands.add_parser("map", help="record which tests execute which line")
    mapping.add_argument("map", type=Path)
    mapping.add_argument("tests", nargs="*", default=["tests"])
    mapping.set_defaults(run=map_tests)
    planting = commands.add_parser("plant", help="plant faults")
    planting.add_argument("map", type=Path)
    planting.add_argument("found", type=Path)
    planting.add_argument("--faults", type=int, default=200)
    planting.add_argument("--seed", type=int, default=0)
    planting.set_defaults(run=plant_all)
    options = parser.parse_args()
    return options.run(options)


if __name__ == "__main__":
    sys.exit(main())
