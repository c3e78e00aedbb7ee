"""The compiled step writes what the eager one writes."""

import shutil
from pathlib import Path

import pytest

from lmlong import recipe_file
from lmlong.checkpoint.write import Contents, write
from lmlong.errors import UsageError
from lmlong.inference.loading import load
from lmlong.model.language_model import LanguageModel
from lmlong.recipe import Attention

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")


@needs_compiler
def test_a_compiled_step_writes_the_same(run: Path) -> None:
    loaded = load(run, "cpu")
    expected = "".join(loaded.stream("to be", max_tokens=40, temperature=0))
    loaded.compile()
    assert "".join(loaded.stream("to be", max_tokens=40, temperature=0)) == expected


def test_a_step_that_is_never_the_same_is_not_compiled(run: Path, tmp_path: Path) -> None:
    loaded = load(run, "cpu")
    options = loaded.recipe.model.model_copy(update={"attention": Attention(kind="softmax")})
    recipe = recipe_file.dump(loaded.recipe.model_copy(update={"model": options}))
    model = LanguageModel(options, loaded.tokenizer.vocabulary)
    write(tmp_path / "softmax", Contents(model.state_dict(), {}, recipe, loaded.tokenizer.file))
    with pytest.raises(UsageError, match="grows"):
        load(tmp_path / "softmax", "cpu").compile()
