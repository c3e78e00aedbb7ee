"""The reference pages are those that tools/docs.py writes from the code."""

import re

import click
import pytest

import docs
import lmlong
from lmlong.recipe.file import recipe_class
from lmlong.recipe.reference import reference


@pytest.mark.parametrize("name", docs.PAGES)
def test_generated_pages_are_up_to_date(name: str) -> None:
    written = (docs.FOLDER / name).read_text(encoding="utf-8")
    assert written == docs.PAGES[name](), f"docs/reference/{name} is out of date: run `python tools/docs.py`"


def test_pages_have_every_command_option_and_name() -> None:
    text = {name: page() for name, page in docs.PAGES.items()}
    for name, command, _ in docs.leaves(docs.command_line, "lmlong"):
        assert f"\n## {name}\n" in text["commands.md"]
        for option in {each.opts[0] for each in command.params if isinstance(each, click.Option)}:
            assert re.search(rf"[`>, ]{option}[`<, ]", text["commands.md"]), (name, option)
    for option in reference(recipe_class()):
        same = next((prefix for prefix in docs.SAME_SECTIONS if option.key.startswith(prefix)), None)
        key = re.escape(same[:-1] if same else option.key)
        assert re.search(rf"`{key}[=`]", text["recipe-options.md"]), option.key
    for name in lmlong.__all__:
        assert f"\n### {name}\n" in text["python.md"]
