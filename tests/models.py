"""Models for tests."""

from typing import TypeVar

import torch
from torch import nn

Model = TypeVar("Model", bound=nn.Module)


def stirred(model: Model, deviation: float = 1.0, seed: int = 0) -> Model:
    """Draw every weight anew, gates, gains and output projections too: a fresh model rests at harmless 0s and 1s, where
    nothing a block does reaches the logits."""
    draw = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        nn.init.normal_(weight, std=deviation, generator=draw)
    return model
