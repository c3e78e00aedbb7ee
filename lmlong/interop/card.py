"""The model card of an export: description, use, evaluation and recipe."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lmlong import __version__
from lmlong.checkpoint.environment import SourceText
from lmlong.errors import UsageError
from lmlong.interop.exporting import RunSource
from lmlong.io.files import parse_json
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
    source: RunSource,
    library: str,
    tags: Sequence[str],
    sections: Sequence[str],
    evaluation: dict[str, Any] | None,
    needs: str = "",
) -> str:
    """Return the text. `needs` is what must be installed, `sections` describe the use of the model, `evaluation` is a
    result of `lmlong eval`."""
    head = HEAD.format(library=library, tags=", ".join(["lmlong", *tags]))
    parts = [head, f"# {name}\n", *([f"{needs}\n"] if needs else []), _facts(source), *sections]
    if source.text:
        parts.append("\n".join(_text(source.text)))
    if evaluation is not None:
        parts.append("\n".join(_lengths(evaluation)))
    shown = recipe_file.dump_without_folders(source.recipe)
    parts.append(f"## Recipe\n\nThe recipe of its training.\n\n```yaml\n{shown}```\n")
    return "\n".join(parts)


def read_evaluation(file: Path) -> dict[str, Any]:
    """Return the result of one run in a file written by `lmlong eval --json`."""
    try:
        (result,) = parse_json(file.read_bytes())["runs"]
        for entry in result["context"]:
            float(entry["bits_per_byte"]), int(entry["length"])
    except (ValueError, TypeError, KeyError, OSError):
        raise UsageError(
            f"{file}: not the result of `lmlong eval RUN --json` for one run. Measure it again, or leave it out."
        ) from None
    return result


def _facts(source: RunSource) -> str:
    recipe, model, tokens, count = source.recipe, source.recipe.model, source.trained_tokens, source.parameters
    kinds = " + ".join(dict.fromkeys(model.mixer_kinds))
    facts = [
        f"A causal language model of {count:,} parameters, written by lmlong {__version__}: {model.layers} layers of",
        f"width {model.width}, attention {kinds}{model.beside_windows}, {model.heads} heads.",
    ]
    if tokens:
        facts.append(f"It was trained on {tokens:,} tokens in sequences of {recipe.text.sequence_length:,}.")
    if source.validation is not None:
        facts.append(f"A sample of the text held out of its training costs it {source.validation:.3f} bits per byte.")
    return "\n".join(facts) + "\n"


def _text(sources: Sequence[SourceText]) -> Iterator[str]:
    yield "## Training text\n\n| source | documents | tokens | held-out tokens |\n|---|---|---|---|"
    for source in sources:
        name = re.sub(r"([\\|`<\[*_])", r"\\\1", source.name)
        yield f"| {name} | {source.train.documents:,} | {source.train.tokens:,} | {source.validation.tokens:,} |"
    yield ""


def _lengths(evaluation: dict[str, Any]) -> Iterator[str]:
    yield "## Evaluation\n\nBits per byte of the same targets, by the tokens of context before them:\n"
    yield "| tokens of context | bits per byte |\n|---|---|"
    for entry in evaluation["context"]:
        yield f"| {name_length(entry['length'])} | {entry['bits_per_byte']:.3f} |"
    yield ""
