"""Export a run as a folder for transformers, with a model card."""

from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from lmlong.checkpoint import manifest
from lmlong.interop.card import card
from lmlong.interop.exporting import Exported, RunSource, as_json, ends, open_export, write_folder
from lmlong.interop.hf import config as configs
from lmlong.interop.hf.tokenizer import UNBOUNDED, tokenizer_files
from lmlong.interop.hf_folder import ARCHITECTURES
from lmlong.model.build import build
from lmlong.model.language_model import LanguageModel
from lmlong.model.sampling_options import DEFAULTS
from lmlong.model.state_size import StateSize, binary_size, state_size

MODULE = Path(__file__).with_name(f"{configs.MODULE}.py")
SAMPLING = {
    "do_sample": True,
    "temperature": DEFAULTS.temperature,
    "top_k": DEFAULTS.top_k or 0,  # 0: no limit; transformers' default is 50
    "top_p": DEFAULTS.top_p,
}
"""lmlong's sampling defaults under transformers' names."""

NO_LOOPS: dict[str, float] = {"loop_penalty": DEFAULTS.effective_loop_penalty}
"""The loop penalty of the exported module."""

NO_LOOPS_OF_OTHERS: dict[str, float] = {"no_repeat_ngram_size": 5}
"""The option against loops of transformers' own models."""

USE = """## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{folder}"{remote})
model = AutoModelForCausalLM.from_pretrained("{folder}"{remote})
inputs = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=100)[0], skip_special_tokens=True))
```
"""
CONSTANT = """A document may have any length: memory and time per token are constant, with {size} of state for each row
of a batch. Rows of a batch are padded on the left. A state cannot go back by a token, so assisted generation is not
supported.
"""
GROWING = """Some of its layers keep the keys and values of all tokens, so its state grows with the text. Rows of a
batch are padded on the left.
"""
NEEDS = "`pip install lmlong` first: the module in this folder runs lmlong's own model."


def export_hf(run: str, folder: Path, evaluation: dict[str, Any] | None = None) -> Exported:
    """Write a run as a folder for transformers, atomically. `evaluation`: a result of `lmlong eval` for its card."""
    source, state = open_export(run, folder), None
    recipe, tokenizer, weights = source.recipe, source.tokenizer, source.weights
    rows = weights["embedding.weight"].shape[0]
    known = ((each, each.config_of(recipe, rows)) for each in ARCHITECTURES)
    architecture, config = next(((each, config) for each, config in known if config), (None, {}))
    if architecture:
        longest, module, no_loops = recipe.text.sequence_length, {}, NO_LOOPS_OF_OTHERS
        named = configs.weights_of(weights, architecture, recipe.model)
    else:
        model = build(recipe, tokenizer.vocabulary)
        assert isinstance(model, LanguageModel)
        config, longest = configs.lmlong_config(recipe.model, tokenizer.vocabulary), UNBOUNDED
        named, module = configs.lmlong_weights(weights), {MODULE.name: MODULE.read_text(encoding="utf-8")}
        no_loops = NO_LOOPS
        state = state_size(model)
    dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    files = {
        "config.json": as_json({**config, **ends(tokenizer), "dtype": dtype}),
        "generation_config.json": as_json({**ends(tokenizer), **SAMPLING, **no_loops}),
        **tokenizer_files(tokenizer, longest),
        **module,
        "README.md": model_card(folder.name, source, state, evaluation),
    }
    write_folder(folder, files, lambda into: save_file(named, into / manifest.WEIGHTS, metadata={"format": "pt"}))
    return Exported(folder, source.parameters, config["architectures"][0])


def model_card(name: str, source: RunSource, state: StateSize | None, evaluation: dict[str, Any] | None) -> str:
    """Return the text. `state` is None if a class of transformers itself loads the model."""
    use = USE.format(folder=name, remote="" if state is None else ", trust_remote_code=True")
    if state is None:
        return card(name, source, "transformers", [], [use], evaluation)
    size = binary_size(state.empty.bytes)
    limits = "## Limits\n\n" + (GROWING if state.per_token.numbers else CONSTANT.format(size=size))
    return card(name, source, "transformers", ["linear-attention"], [use, limits], evaluation, NEEDS)
