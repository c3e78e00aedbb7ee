"""n-gram heads that are added to a trained model and trained alone, or by a conversion."""

from pathlib import Path

import torch

from lmlong.training.run import train

from .conftest import SOFTMAX, Recipes, losses, weights

HEADS = [*SOFTMAX, "model.add_ngram=[1]", "model.attention.ngram.buckets=64"]
ALONE = [*HEADS, "training.only_ngram=true"]


def test_heads_alone_are_trained_and_all_other_weights_stay(softmax: Path, recipe_of: Recipes, tmp_path: Path) -> None:
    start = f"training.init_from={softmax}"
    for steps in (1, 30):
        train(recipe_of(start, *ALONE, f"training.steps={steps}"), tmp_path / f"{steps}")
    before, after = weights(softmax), weights(tmp_path / "30")
    added = after.keys() - before.keys()
    assert added and all(name.startswith("blocks.0.ngram.") for name in added)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert after["blocks.0.ngram.out_proj.weight"].abs().max() > 0
    train(recipe_of(start, *SOFTMAX, "training.steps=1", "training.learning_rate=1e-30"), tmp_path / "without")
    without, first = losses(tmp_path / "without")[0], losses(tmp_path / "1")[0]
    assert first == without  # new heads leave the first loss as it is
    train(recipe_of(f"training.init_from={tmp_path / '30'}", *HEADS, "training.steps=1"), tmp_path / "again")
    assert losses(tmp_path / "again")[0] < first  # and after training the loss of the same batch is lower


def test_a_model_with_heads_can_be_the_start_of_one_without(softmax: Path, recipe_of: Recipes, tmp_path: Path) -> None:
    train(recipe_of(f"training.init_from={softmax}", *HEADS, "training.steps=1"), tmp_path / "with")
    start = [f"training.init_from={tmp_path / 'with'}", "training.steps=1", "model.add_ngram=[]"]
    train(recipe_of(*start, *SOFTMAX), tmp_path / "without")
    assert weights(tmp_path / "without").keys() == weights(softmax).keys()
