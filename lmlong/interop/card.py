"""The card of an exported model: what it is, how it is used, how it reads and how it was made."""

from collections.abc import Iterator, Sequence
from typing import Any

from lmlong import __version__
from lmlong.interop.exporting import Source
from lmlong.recipe import file as recipe_file
from lmlong.recipe.lengths import name_length

HEAD = """---
library_name: {library}
pipeline_tag: text-generation
tags: [{tags}]
---
"""


def card(
    name: str,
    source: Source,
    library: str,
    tags: Sequence[str],
    sections: Sequence[str],
    evaluation: dict[str, Any] | None,
) -> str:
    """Return the text, with sections that tell how the model is used; `evaluation` is what `lmlong eval` told of it."""
    head = HEAD.format(library=library, tags=", ".join(["lmlong", *tags]))
    parts = [head, f"# {name}\n", _facts(source), *sections]
    if evaluation is not None:
        parts.append("\n".join(_lengths(evaluation)))
    shown = recipe_file.dump_without_folders(source.recipe)
    parts.append(f"## Recipe\n\nThe options that it was trained by.\n\n```yaml\n{shown}```\n")
    return "\n".join(parts)


def _facts(source: Source) -> str:
    recipe, model, tokens = source.recipe, source.recipe.model, source.trained_tokens
    count = sum(weight.numel() for weight in source.weights.values())
    kinds = " + ".join(dict.fromkeys(model.kinds))
    facts = [
        f"A causal language model of {count:,} parameters, written by lmlong {__version__}: {model.layers} layers of",
        f"width {model.width}, attention {kinds}, {model.heads} heads.",
    ]
    if tokens:
        facts.append(f"It was trained on {tokens:,} tokens in sequences of {recipe.text.sequence_length:,}.")
    if source.validation is not None:
        facts.append(f"Held-out text of its training costs it {source.validation:.3f} bits per byte.")
    return "\n".join(facts) + "\n"


def _lengths(evaluation: dict[str, Any]) -> Iterator[str]:
    yield "## How well it reads\n\nBits per byte of the same targets by how much of the text before them is read:\n"
    yield "| tokens of context | bits per byte |\n|---|---|"
    for at in evaluation["context"]:
        yield f"| {name_length(at['length'])} | {at['bits_per_byte']:.3f} |"
    yield ""
