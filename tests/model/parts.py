"""Models and texts whose parts are read by several processes."""

from typing import Any

import torch
from models import kinds, stirred
from torch import Tensor

from lmlong import recipe
from lmlong.attention.device_policy import CPU_POLICY, DevicePolicy, use_policy
from lmlong.model.language_model import LanguageModel

VOCABULARY, TOKENS = 20, 150

WINDOW = 30

KINDS: dict[str, dict[str, object]] = {
    **kinds(WINDOW),
    "fixed decay": {"kind": "linear", "decay": "fixed"},
    "parallel window and delta": {"kind": "delta", "parallel_window": WINDOW},
    "ngram": {"kind": "ngram", "ngram": recipe.Ngram(buckets=32)},
    "mixed": {"kind": ["linear", "window"], "window": WINDOW},
}


def build(kind: str, checkpointing: bool = False, policy: DevicePolicy = CPU_POLICY, **shape: Any) -> LanguageModel:
    attention = recipe.Attention(**KINDS[kind])  # type: ignore[arg-type]
    options = recipe.Model(**{"width": 16, "layers": 2, "heads": 2, "attention": attention, **shape})
    model = stirred(LanguageModel(options, VOCABULARY, checkpointing), 0.3).double()
    model.set_state_dtype(torch.float64)
    use_policy(model, policy)
    return model


def text(starts: list[int], rows: int = 2, time: int = TOKENS) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, targets and document starts; documents start in the first row only."""
    tokens = torch.randint(VOCABULARY, (rows, time + 1), generator=torch.Generator().manual_seed(1))
    document_starts = torch.zeros(rows, time, dtype=torch.bool)
    document_starts[0, starts] = True
    return tokens[:, :-1], tokens[:, 1:].clone(), document_starts
