"""The sources of a recipe, opened: what each gives to training and what it holds back to validate."""

from typing import NamedTuple

from lmlong import recipe
from lmlong.text.corpus import Source, open_source


class Input(NamedTuple):
    """A source, its share of the training text, and how much of it validates."""

    source: Source
    weight: float
    held_out: float  # share of its text


def open_inputs(text: recipe.Text) -> list[Input]:
    """The sources to train on, then those to validate on."""
    held_out = 0.0 if text.validation.sources else text.validation.fraction
    inputs = [Input(open_source(options, text.errors), options.weight, held_out) for options in text.sources]
    return inputs + [Input(open_source(options, text.errors), 0.0, 1.0) for options in text.validation.sources]
