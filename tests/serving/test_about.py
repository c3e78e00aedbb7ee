"""What the server says of its model."""

from dataclasses import replace
from typing import Any

import pytest
from serving.schedulers import tiny

from lmlong.model.base import count_parameters
from lmlong.recipe import Recipe
from lmlong.serving.app import about

STDLIB: dict[str, Any] = {"kind": "python-stdlib"}


@pytest.mark.parametrize(
    ("sources", "writes"),
    [
        ([STDLIB], "code"),
        ([{"kind": "files", "paths": ["/home/me/secret/**/*.py", "b.RS"]}], "code"),
        ([{"kind": "files", "paths": ["/home/me/secret", "b.py"]}], "text"),
        ([STDLIB, {"kind": "files", "paths": ["a.txt"]}], "text"),
        ([{"kind": "hub", "dataset": "org/name"}], "text"),
    ],
)
def test_it_says_what_the_model_writes_and_names_no_file(sources: list[dict[str, Any]], writes: str) -> None:
    trained = replace(tiny(), recipe=Recipe.model_validate({"text": {"sources": sources}}), trained_tokens=12_345)
    said = about(trained)
    assert said["writes"] == writes
    stdlib = " of Python's standard library" if sources == [STDLIB] else ""
    assert said["about"] == f"{count_parameters(trained.model):,} parameters, trained on 12,345 tokens{stdlib}."
