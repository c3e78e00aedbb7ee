"""The compiled step writes what the eager one writes."""

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from models import stirred
from torch.testing import assert_close

from lmlong.attention.native.library import find_compiler
from lmlong.checkpoint.write import Contents, write
from lmlong.cli.generate import generate
from lmlong.cli.writing import compiling_pays
from lmlong.errors import UsageError
from lmlong.inference.loading import Weights, load
from lmlong.inference.memory import ask
from lmlong.model.graph import as_graph
from lmlong.model.language_model import LanguageModel
from lmlong.model.states import joined
from lmlong.recipe import Attention, Downsample, Model
from lmlong.recipe import file as recipe_file

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="torch.compile needs a C++ compiler")


@needs_compiler
@pytest.mark.parametrize("weights", ["32", "bf16", "int8"])
def test_a_compiled_step_writes_the_same(run: Path, weights: Weights) -> None:
    loaded = load(run, "cpu", weights)
    memory = loaded.read("to be")
    expected = ask(loaded.model, memory)[0]
    text = "".join(loaded.stream("to be", max_tokens=40, temperature=0))
    loaded.compile()
    assert_close(ask(loaded.model, memory)[0], expected, rtol=1e-5, atol=1e-5)
    assert "".join(loaded.stream("to be", max_tokens=40, temperature=0)) == text


@needs_compiler
@torch.inference_mode()
def test_a_compiled_step_of_a_model_that_reads_blocks_is_the_eager_one() -> None:
    """One graph while no block is full, one where a block of all rows is, and one where only some rows have one."""
    options = Model(width=16, layers=3, heads=2, downsample=Downsample(factor=3))
    model = stirred(LanguageModel(options, 30)).eval()
    eager, compiled = model.answer, as_graph(model.answer, torch.device("cpu"))
    for rows in ([5, 5], [1, 6]):  # tokens that were read before
        state = joined([model.prefill(torch.arange(count)[None])[1] for count in rows])
        for token in torch.arange(24).view(12, 2):
            model.answer = eager  # type: ignore[method-assign]
            expected, _ = model.step(token, state)
            model.answer = compiled  # type: ignore[method-assign]
            logits, state = model.step(token, state)
            assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@needs_compiler
def test_only_long_texts_are_compiled_for(run: Path) -> None:
    loaded = load(run, "cpu")
    assert [compiling_pays(loaded, tokens) for tokens in (-1, 5000, 4999, 0)] == [True, True, False, False]
    done = CliRunner().invoke(generate, [str(run), "--prompt", "a", "--max-tokens", "2", "--compile"])
    assert (done.exit_code, done.stderr) == (0, "compiling the step, for some seconds\n")


def test_a_step_that_is_never_the_same_is_not_compiled(run: Path, tmp_path: Path) -> None:
    loaded = load(run, "cpu")
    options = loaded.recipe.model.model_copy(update={"attention": Attention(kind="softmax")})
    recipe = recipe_file.dump(loaded.recipe.model_copy(update={"model": options}))
    model = LanguageModel(options, loaded.tokenizer.vocabulary)
    write(tmp_path / "softmax", Contents(model.state_dict(), {}, recipe, loaded.tokenizer.file))
    with pytest.raises(UsageError, match="grows"):
        load(tmp_path / "softmax", "cpu").compile()
    assert not compiling_pays(load(tmp_path / "softmax", "cpu"), -1)
