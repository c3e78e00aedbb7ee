"""The tables of what fits on several GPUs."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture
def scaling(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(TOOLS)
    monkeypatch.delitem(sys.modules, "scaling", raising=False)
    import scaling

    return scaling


def shown(scaling: ModuleType, name: str) -> list[str]:
    """The lines of a table in the page."""
    table = scaling.PAGE.read_text(encoding="utf-8").split(scaling.mark(name))[1]
    return table[: table.index("```")].splitlines()


def test_only_softmax_sends_more_for_longer_texts(scaling: ModuleType) -> None:
    lines = scaling.sent_table(("linear", "softmax"))
    assert set(lines) < set(shown(scaling, "sent"))
    linear, softmax = ([float(cell.replace(",", "")) for cell in line.split()[1:]] for line in lines[1:])
    assert linear[:2] == linear[2:] and softmax[2] > 15 * softmax[0]


def test_more_gpus_hold_longer_rows(scaling: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """With activations of 1 GB for 1,000 tokens, in the place of those that are computed."""
    monkeypatch.setattr(scaling, "activations", lambda model, recompute, tokens: 10**6 * tokens)
    monkeypatch.setattr(scaling, "effects", lambda model, recompute, parts: 10**6 * parts)
    assert scaling.setup("118M", 2**17, False, 1) is None
    two, eight = (scaling.setup("118M", 2**17, False, gpus) for gpus in (2, 8))
    assert (two.parts, two.stage) == (eight.parts, eight.stage) == (2, "ddp")
    assert 65 < two.tensors.total / 1e9 < 72 and two.tensors.effects == 2 * 10**6
    for length, stage in ((270_000, "ddp"), (279_000, "2"), (281_000, "3")):
        longer = scaling.setup("118M", length, False, 4)  # 70 GB of activations, and 1 to 2 GB of the training state
        assert (longer.parts, longer.stage) == (4, stage)


@pytest.mark.slow
def test_the_page_has_the_computed_tables(scaling: ModuleType) -> None:
    for name, lines in scaling.tables():
        assert lines == shown(scaling, name), "docs/reference/scaling.md is out of date: run tools/scaling.py --write"
