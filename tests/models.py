"""Tiny models for tests, and their runs on disk."""

from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lmlong import recipe
from lmlong.checkpoint.write import Contents, write
from lmlong.data.tokenizers.base import ByteTokenizer, Tokenizer
from lmlong.model.build import build
from lmlong.model.language_model import LanguageModel
from lmlong.model.ngram_embedding import NgramEmbedding
from lmlong.recipe import Recipe, Rope, RopeScaling
from lmlong.recipe import file as recipe_file
from lmlong.recipe.attention import Attention, Favor, Ngram

Model = TypeVar("Model", bound=nn.Module)


LIKE_LLAMA: dict[str, Any] = {
    "kv_heads": 2,
    "convolution": 0,
    "positions": "rotary",
    "rope": Rope(base=500.0, scaling=RopeScaling(factor=3.0, original_length=40)),
    "output_gate": False,
    "head_norm": False,
    "norm_epsilon": 1e-3,
    "embedding_scale": 0.7,
    "tied_output": False,
    "mlp_width": 20,
}
"""All that the blocks of a Llama do in another way, for models of a multiple of two heads."""


HYBRIDS: dict[str, dict[str, Any]] = {
    "like Qwen": {
        "layers": 2,
        "heads": 4,
        "key_heads": 2,
        "head_dim": 6,
        "value_dim": 4,
        "convolution_activation": "silu",
        "head_norm": "shared",
        "head_norm_epsilon": 1e-4,
        "centered_gains": True,
        "attention": Attention(
            kind=["delta", "softmax"], decay="softplus", delta=recipe.Delta(feature_map="identity", beta_bias=False)
        ),
        "mixers": [
            recipe.Mixer(
                kind="softmax",
                heads=2,
                kv_heads=1,
                head_dim=8,
                value_dim=8,
                convolution=0,
                positions="rotary",
                rope=Rope(base=500.0, share=0.25),
                query_key_norm="head",
                output_gate="sigmoid",
                head_norm=False,
            )
        ],
    },
    "like OLMo": {
        "layers": 2,
        "head_dim": 5,
        "value_dim": 9,
        "convolution_activation": "silu",
        "head_norm": "shared",
        "attention": Attention(
            kind=["delta", "softmax"], decay="softplus", delta=recipe.Delta(feature_map="identity", max_beta=2)
        ),
        "mixers": [
            recipe.Mixer(
                kind="softmax", convolution=0, query_key_norm="all", output_gate=False, head_norm=False, norm="after"
            )
        ],
    },
    "like LFM2": {
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "convolution": 0,
        "query_key_norm": "head",
        "output_gate": False,
        "head_norm": False,
        "attention": Attention(kind=["convolution", "softmax"]),
        "mixers": [recipe.Mixer(kind="convolution", convolution=3, input_gate=True, output_gate="identity")],
    },
}
"""All that the blocks of other hybrid models do in another way."""


def kinds(window: int) -> dict[str, dict[str, object]]:
    """Options of every kind of attention that a recipe has, and of what changes how it computes."""
    return {
        "linear": {"kind": "linear"},
        "channel": {"kind": "linear", "decay": "channel"},
        "no decay": {"kind": "linear", "decay": "none"},
        "favor": {"kind": "linear", "feature_map": "favor"},
        "delta": {"kind": "delta"},
        "window": {"kind": "window", "window": window},
        "window and sink": {"kind": "window", "window": window, "window_sink": True},
        "parallel window": {"kind": "linear", "parallel_window": window},
        "softmax": {"kind": "softmax"},
        "ngram": {"kind": "ngram"},
    }


def stirred(model: Model, deviation: float = 1.0, seed: int = 0) -> Model:
    """Draw every weight anew, gates, gains and output projections too: a fresh model rests at harmless 0s and 1s, where
    nothing a block does reaches the logits."""
    draw = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        nn.init.normal_(weight, std=deviation, generator=draw)
    for module in model.modules():
        if isinstance(module, NgramEmbedding):
            nn.init.normal_(module.table, std=deviation, generator=draw)
    return model


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
    "own heads": {
        "attention": Attention(kind=["delta", "window"], window=7),
        "kv_heads": 2,
        "mixers": [
            recipe.Mixer(kind="delta", heads=2, kv_heads=1, head_dim=6, value_dim=10, convolution=2),
            recipe.Mixer(kind="window", heads=6, head_dim=4, output_gate=False, positions="rotary"),
        ],
    },
    "sink beside delta": {"attention": Attention(kind="delta", parallel_window=9, window_sink=True), "kv_heads": 2},
}
"""Models of bytes with every kind of state, and every option that changes how a step computes."""


FORMS |= HYBRIDS


def predict(model: nn.Module, *text: Any) -> tuple[Tensor, Any]:
    """Return the logits (B, T, V) of the token after each of a text, and the state after the last."""
    hidden, after = model(*text)
    return model.logits(hidden), after  # type: ignore[operator]


def model_of(form: str, vocabulary: int = 258) -> LanguageModel:
    return _model({"width": 32, "layers": 2, "heads": 4, **FORMS[form]}, vocabulary)


def _model(options: dict[str, Any], vocabulary: int) -> LanguageModel:
    torch.manual_seed(0)
    model = LanguageModel(recipe.Model(**options), vocabulary).eval()
    for name, weight in model.named_parameters():
        if "proj" not in name or name.endswith("out_proj.weight"):
            nn.init.normal_(weight, mean=weight.mean().item(), std=0.3)
    if model.ngram_embedding:
        nn.init.normal_(model.ngram_embedding.table)
    return model


def save_run(run: Path, chosen: Recipe, model: nn.Module, tokenizer: Tokenizer, step: int = 1, *metrics: float) -> Path:
    """Write a run folder with one checkpoint."""
    contents = Contents(model.state_dict(), {"step": step}, recipe_file.dump(chosen), tokenizer.file, step, *metrics)
    write(run / "checkpoints" / f"step-{step:08}", contents)
    return run


def write_run(
    run: Path,
    tokenizer: Tokenizer | None = None,
    objective: Any = "causal",
    chosen: Recipe | None = None,
    step: int = 1,
    deviation: float | None = None,
    **options: Any,
) -> LanguageModel:
    """Write a run of a model with all its weights drawn; the model.

    It is the model of a recipe, or of `options` beside those of a small one. With a recipe or a `deviation`, weights
    are `stirred`.
    """
    tokenizer, options = tokenizer or ByteTokenizer(), {"width": 32, "layers": 2, "heads": 4, **options}
    if chosen is None and deviation is None:
        model = _model(options, tokenizer.vocabulary)
    if chosen is None:
        training, text = recipe.Training(steps=1), recipe.Text()
        chosen = Recipe(objective=objective, model=recipe.Model(**options), training=training, text=text)
    else:
        deviation = deviation or 1.0
    if deviation is not None:
        model = stirred(build(chosen, tokenizer.vocabulary), deviation)
    save_run(run, chosen, model, tokenizer, step, 1.5, 12345)
    return model


def text(rows: int, time: int) -> Tensor:
    """A text of few letters, so that n-grams come again."""
    ids = torch.randint(97, 101, (rows, time), generator=torch.Generator().manual_seed(1))
    ids[:, 0] = 256
    return ids
