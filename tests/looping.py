"""A model that loops, as small trained ones do, and shows at once: its token hardly depends on more than the last."""

from pathlib import Path

import torch
from models import save_run

from lmlong import recipe
from lmlong.data.tokenizers.base import ByteTokenizer
from lmlong.model.language_model import LanguageModel
from lmlong.recipe import Attention, Model, Recipe, Text, Training

CYCLE = "klmnopqr "
LETTERS = "abcdefghijklmnopqrstuvwxyz .,"
WIDTH = 260
"""A direction for each byte, and both ends of a document."""


def write_looping_run(folder: Path) -> Path:
    """Write a run folder of a model whose likeliest text is a cycle of letters, by far; any other letter may come."""
    tokenizer = ByteTokenizer()
    options = Model(width=WIDTH, layers=1, heads=2, tied_output=False, attention=Attention(kind="linear"))
    made = Recipe(text=Text(tokenizer=recipe.Tokenizer(kind="bytes")), model=options, training=Training(steps=1))
    model = LanguageModel(options, tokenizer.vocabulary)
    weights = model.state_dict()
    for name, weight in weights.items():
        if name.endswith("out_proj.weight"):
            weight.zero_()  # blocks add nothing: what comes next depends on the last token alone
    weights["embedding.weight"].copy_(torch.eye(tokenizer.vocabulary, WIDTH))
    weights["lm_head.output.weight"].copy_(_logits(tokenizer.vocabulary) / WIDTH**0.5)  # the norm makes it 1 again
    return save_run(folder, made, model, tokenizer)


def _logits(vocabulary: int) -> torch.Tensor:
    """Return the logits of each token (V, WIDTH) after each token."""
    logits = torch.full((vocabulary, WIDTH), -9.0)
    logits[list(LETTERS.encode())] = 0.0
    logits[ord(CYCLE[0])] = 4.0
    for now, following in zip(CYCLE.encode(), (CYCLE[1:] + CYCLE[0]).encode(), strict=True):
        logits[ord(CYCLE[0]), now] = 0.0
        logits[following, now] = 9.0
    return logits
