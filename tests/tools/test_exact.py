"""The digests of tools/baseline: they stay the same as long as every bit does, and the cases leave no kind out."""

import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from baseline_parts import digests, exact, variants
from baseline_parts.model_step import gradients
from baseline_parts.workspace import Workspace, workspace

from lmlong.recipe.attention import Attention
from lmlong.recipe.kinds import ATTENTION_KINDS, FEATURE_MAP_KINDS

BASELINE = Path(__file__).parents[2] / "tools" / "baseline"
CASE = "gradients linear elu none"


@pytest.fixture(scope="module")
def folder() -> Iterator[Workspace]:
    with workspace() as made:
        yield made


def values(folder: Workspace, **options: Any) -> dict[str, Any]:
    return gradients(folder.recipe({"text.sequence_length": 40, **variants.linear(), **options}), True)


def test_digests_differ_where_numbers_do(folder: Workspace) -> None:
    changed = values(folder)
    first = digests.parts(changed)
    assert digests.parts(values(folder)) == first

    other = digests.parts(values(folder, seed=1))
    same = [path for path in first if first[path] == other[path]]
    assert first.keys() == other.keys() and not [path for path in same if not path.startswith("/state")]

    gradient = changed["gradients"]["blocks.1.mlp.out_proj.weight"]
    gradient[0, 0] = torch.nextafter(gradient[0, 0], torch.tensor(9.0))
    one_bit = digests.parts(changed)
    assert [path for path in first if first[path] != one_bit[path]] == ["/gradients/blocks.1.mlp.out_proj.weight"]
    assert digests.digest(first) != digests.digest(one_bit)


def test_digest_knows_shape_and_type() -> None:
    tensors = [torch.zeros(4), torch.zeros(2, 2), torch.zeros(4, dtype=torch.int32), torch.zeros(8, dtype=torch.half)]
    assert len({digests.leaf_digest(tensor) for tensor in [*tensors, 0.0, 0, "0"]}) == 7


def test_every_kind_has_a_case() -> None:
    tables = {**variants.LINEAR, **variants.KINDS, **variants.DETAILS, **variants.ENCODERS}
    chosen = [options["model.attention"] for options in tables.values()]
    kinds, maps = (
        {name for name, about in each.items() if not about.plugin} for each in (ATTENTION_KINDS, FEATURE_MAP_KINDS)
    )
    assert {
        kind for each in chosen for kind in ([each["kind"]] if isinstance(each["kind"], str) else each["kind"])
    } == kinds
    assert {each["feature_map"] for each in chosen if "feature_map" in each} == maps
    decays = {each["decay"] for each in chosen if "decay" in each}
    assert decays == set(get_args(Attention.model_fields["decay"].annotation))
    names = {case.name for case in exact.find_cases()}
    assert all({f"gradients {name}", f"train {name}"} <= names for name in variants.KINDS | variants.ENCODERS)


def test_differences_are_named() -> None:
    now = exact.Measured({"same": "1", "other": "2", "new": "3"}, {}, {"broken": "ValueError: no\nsuch thing"})
    before = {"same": "1", "other": "1", "broken": "1", "gone": "1"}
    lines = ["failed: broken: ValueError: no", "differs: other"]
    assert exact.differences(now, before, whole=False) == lines
    assert exact.differences(now, before, whole=True) == [*lines, "missing: gone"]


def test_command_names_a_changed_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = runpy.run_path(str(BASELINE))
    history = tmp_path / "history.jsonl"
    monkeypatch.setattr(sys, "argv", ["baseline", "--exact", "--only", f"^{CASE}$", "--history", str(history)])

    def command() -> tuple[int, str]:
        return module["main"](), capsys.readouterr().out

    assert command()[0] == 1  # there is nothing to compare with
    line = module["line_of"](0.0, {}, {}, exact.measure(exact.find_cases(f"^{CASE}$")).cases)
    for digest, code, told in ((line["exact"][CASE], 0, "1 cases, "), ("0" * digests.SHORT, 1, f"differs: {CASE}\n")):
        line["exact"][CASE] = digest
        history.write_text(json.dumps(line) + "\n")
        found, output = command()
        assert found == code and output.startswith(told)
