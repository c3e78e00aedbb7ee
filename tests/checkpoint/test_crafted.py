"""Files with changed values under a digest that is right: used or refused, and nothing else.

What a number stands for, and many more of them: `tools/fuzz.py crafted-checkpoints --cases 1 --seed NUMBER`.
"""

from pathlib import Path

import pytest
from crafted import FORMATS, try_crafted


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_crafted_is_used_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("LMLONG_CACHE", str(tmp_path / "cache"))
    form = FORMATS[name]
    prepared = form.prepare(tmp_path)
    tried = {number: try_crafted(number, form, prepared) for number in range(form.usual)}
    assert {number: complaints for number, (_, complaints) in tried.items() if complaints} == {}
    assert {outcome for outcome, _ in tried.values()} >= form.outcomes
