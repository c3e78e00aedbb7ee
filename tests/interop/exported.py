"""Runs of tiny models of every kind, to be exported."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lmlong import recipe
from lmlong.checkpoint import write
from lmlong.data.tokenizers.base import ByteTokenizer, Tokenizer
from lmlong.model.language_model import LanguageModel
from lmlong.recipe import file as recipe_file
from lmlong.recipe.attention import Attention, Favor, Ngram

FORMS: dict[str, dict[str, Any]] = {
    "elu": {"attention": Attention(kind="linear")},
    "relu": {"attention": Attention(kind="linear", feature_map="relu", decay="fixed"), "heads": 1},
    "softmax features": {"attention": Attention(kind="linear", feature_map="softmax", decay="fixed")},
    "channel": {"attention": Attention(kind="linear", decay="channel"), "head_norm": False},
    "favor": {"attention": Attention(kind="linear", feature_map="favor", decay="fixed"), "kv_heads": 2},
    "hyperbolic": {"attention": Attention(kind="linear", feature_map="favor", favor=Favor(form="hyperbolic"))},
    "taylor": {"attention": Attention(kind="linear", feature_map="taylor", decay="none")},
    "hedgehog": {"attention": Attention(kind="linear", feature_map="hedgehog"), "convolution": 0},
    "cosine": {"attention": Attention(kind="linear", feature_map="cosine"), "output_gate": False},
    "delta": {"attention": Attention(kind="delta"), "value_dim": 12},
    "delta of elu": {"attention": Attention(kind="delta", decay="none", delta=recipe.Delta(feature_map="elu"))},
    "window": {"attention": Attention(kind=["window", "linear"], window=7), "convolution": 1},
    "sink": {"attention": Attention(kind=["window", "linear"], window=7, window_sink=True), "kv_heads": 2},
    "window of one token": {"attention": Attention(kind="window", window=1, window_sink=True)},
    "softmax": {"attention": Attention(kind=["softmax", "delta"]), "tied_output": False},
    "ngram": {"attention": Attention(kind=["linear", "ngram"], ngram=Ngram(sizes=[1, 2], buckets=11))},
    "tables": {
        "attention": Attention(kind=["linear", "ngram"], ngram=Ngram(sizes=[1, 2], buckets=11)),
        "ngram_embedding": recipe.NgramEmbedding(orders=[3, 2], rows=13, width=6),
    },
    "tables of single tokens": {
        "attention": Attention(kind="linear"),
        "ngram_embedding": recipe.NgramEmbedding(orders=[1], rows=300, width=6),
    },
    "window beside": {
        "attention": Attention(kind="linear", parallel_window=9),
        "kv_heads": 1,
        "rope": recipe.Rope(base=500.0, scaling=recipe.RopeScaling(original_length=20)),
    },
    "window beside delta": {"attention": Attention(kind="delta", parallel_window=100), "positions": "none"},
    "sink beside delta": {"attention": Attention(kind="delta", parallel_window=9, window_sink=True), "kv_heads": 2},
}


def write_run(
    run: Path, tokenizer: Tokenizer | None = None, objective: Any = "causal", **options: Any
) -> LanguageModel:
    """Write a run of a model with all its weights drawn; the model."""
    tokenizer = tokenizer or ByteTokenizer()
    chosen = recipe.Recipe(
        objective=objective,
        model=recipe.Model(**{"width": 32, "layers": 2, "heads": 4, **options}),
        training=recipe.Training(steps=1),
        text=recipe.Text(),
    )
    torch.manual_seed(0)
    model = LanguageModel(chosen.model, tokenizer.vocabulary).eval()
    for name, weight in model.named_parameters():
        if "proj" not in name or name.endswith("out_proj.weight"):
            nn.init.normal_(weight, mean=weight.mean().item(), std=0.3)
    if model.ngram_embedding:
        nn.init.normal_(model.ngram_embedding.table)
    folder = run / "checkpoints" / "step-00000001"
    says = recipe_file.dump(chosen)
    write.write(folder, write.Contents(model.state_dict(), {"step": 1}, says, tokenizer.file, 1, 1.5, 12345))
    return model


def text(rows: int, time: int) -> Tensor:
    """A text of few letters, so that n-grams come again."""
    ids = torch.randint(97, 101, (rows, time), generator=torch.Generator().manual_seed(1))
    ids[:, 0] = 256
    return ids
