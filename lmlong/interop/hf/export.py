"""Export a run as a folder for transformers."""

from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from lmlong.checkpoint import manifest
from lmlong.interop.exporting import Exported, as_json, ends, open_export, write_folder
from lmlong.interop.hf import config as configs
from lmlong.interop.hf.card import model_card
from lmlong.interop.hf.tokenizer import UNBOUNDED, tokenizer_files
from lmlong.model.build import build
from lmlong.model.language_model import LanguageModel
from lmlong.model.sampling_options import DEFAULTS
from lmlong.model.state_size import state_size

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

NO_LOOPS_OF_LLAMA: dict[str, float] = {"no_repeat_ngram_size": 5}
"""The option against loops of transformers' own Llama."""


def export_hf(run: str, folder: Path, evaluation: dict[str, Any] | None = None) -> Exported:
    """Write a run as a folder for transformers, atomically. `evaluation`: a result of `lmlong eval` for its card."""
    source, state = open_export(run, folder), None
    recipe, tokenizer, weights = source.recipe, source.tokenizer, source.weights
    if configs.is_llama(recipe.model):
        config, longest = configs.llama_config(recipe, tokenizer.vocabulary), recipe.text.sequence_length
        named, module, no_loops = configs.llama_weights(weights, recipe.model), {}, NO_LOOPS_OF_LLAMA
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
    return Exported(folder, sum(weight.numel() for weight in weights.values()), config["architectures"][0])
