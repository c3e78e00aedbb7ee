"""The card of an exported model: what it is, how it reads, how it was made and how to use it."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from lmlong import __version__
from lmlong.checkpoint import manifest, read
from lmlong.model.state_size import StateSize
from lmlong.recipe import Recipe
from lmlong.recipe import file as recipe_file
from lmlong.recipe.lengths import name_length

HEAD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [lmlong{tags}]
---
"""
USE = """## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{folder}"{remote})
model = AutoModelForCausalLM.from_pretrained("{folder}"{remote})
inputs = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=100)[0], skip_special_tokens=True))
```
"""
CONSTANT = """A document begins with an empty state and may be of any length: memory and time per token stay as they
are, {size} of state for each row of a batch. Rows of a batch are padded on the left. A state cannot go back by a token,
so assisted generation is refused.
"""
GROWING = """Some of its layers keep the keys and values of all tokens, so its state grows with the text. Rows of a
batch are padded on the left.
"""
SPEED = "The module in this folder is plain torch; lmlong itself reads and writes the same model by native code.\n"


def model_card(
    name: str,
    recipe: Recipe,
    checkpoint: Path,
    weights: dict[str, Tensor],
    state: StateSize | None,
    evaluation: dict[str, Any] | None,
) -> str:
    """Return the text; `state` is given where the module of this folder reads the model, `evaluation` is what
    `lmlong eval` told of it."""
    parts = [
        HEAD.format(tags="" if state is None else ", linear-attention"),
        f"# {name}\n",
        _facts(recipe, checkpoint, weights),
    ]
    parts.append(USE.format(folder=name, remote="" if state is None else ", trust_remote_code=True"))
    if state is not None:
        size = f"{state.empty.bytes / 1024:,.0f} KiB"
        parts += ["## Limits\n", (GROWING if state.per_token.numbers else CONSTANT.format(size=size)) + SPEED]
    if evaluation is not None:
        parts.append("\n".join(_lengths(evaluation)))
    shown = _without_folders(recipe_file.dump(recipe))
    parts.append(f"## Recipe\n\nThe options that it was trained by.\n\n```yaml\n{shown}```\n")
    return "\n".join(parts)


def _facts(recipe: Recipe, checkpoint: Path, weights: dict[str, Tensor]) -> str:
    model, says = recipe.model, manifest.read(checkpoint)
    count, tokens = sum(weight.numel() for weight in weights.values()), read.trained_tokens(checkpoint)
    kinds = " + ".join(dict.fromkeys(model.kinds))
    facts = [
        f"A causal language model of {count:,} parameters, written by lmlong {__version__}: {model.layers} layers of",
        f"width {model.width}, attention {kinds}, {model.heads} heads.",
    ]
    if tokens:
        facts.append(f"It was trained on {tokens:,} tokens in sequences of {recipe.text.sequence_length:,}.")
    if says.validation is not None:
        facts.append(f"Held-out text of its training costs it {says.validation:.3f} bits per byte.")
    return "\n".join(facts) + "\n"


def _lengths(evaluation: dict[str, Any]) -> Iterator[str]:
    yield "## How well it reads\n\nBits per byte of the same targets by how much of the text before them is read:\n"
    yield "| tokens of context | bits per byte |\n|---|---|"
    for at in evaluation["context"]:
        yield f"| {name_length(at['length'])} | {at['bits_per_byte']:.3f} |"
    yield ""


def _without_folders(recipe: str) -> str:
    """Return a recipe in which files are named without the folders that they were in."""
    return re.sub(r"(?m)(?<=[:-] )/(?:[^\n/]+/)*(?=[^\n/]+$)", "", recipe)
