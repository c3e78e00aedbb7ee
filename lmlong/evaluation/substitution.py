"""Looking into a model while it reads: another function in place of what its attentions do."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from lmlong.attention.contract import CausalAttention
from lmlong.model.language_model import LanguageModel


@contextmanager
def prefilled_by(function: Callable[..., Any], attentions: Sequence[CausalAttention]) -> Iterator[None]:
    """While this lasts, each attention's `prefill(...)` is `function(attention, ...)`."""
    for attention in attentions:
        attention.prefill = partial(function, attention)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for attention in attentions:
            del attention.prefill


def attentions_of(model: LanguageModel) -> list[CausalAttention]:
    """The attention of each layer."""
    return [block.mixer.attention for block in model.blocks]
