#!/usr/bin/env python
"""Take a trained model's attention out, put another one in, and see how fast it recovers.

    tools/swap_attention.py RUN --to favor-fixed elu-learned --steps 0 50 300 --out runs/swap

For each attention: bits per byte on the run's held-out text right after the swap and after so many steps of training
on the run's own text, as a Markdown table. Queries, keys and values keep the positions they were trained with.
"""

import argparse
from pathlib import Path

import torch

from lmlong.checkpoint import read
from lmlong.data.batches import scored_tokens, validation_batches
from lmlong.evaluation.perplexity import validation_text
from lmlong.inference.loading import TrainedLanguageModel, load
from lmlong.model.language_model import LanguageModel
from lmlong.model.metrics import loss_totals
from lmlong.recipe import file as recipe_file
from lmlong.training.metrics_log import last_validation, read_entries
from lmlong.training.run import train

ATTENTIONS = {
    "softmax": ["kind=softmax"],
    "favor": ["kind=linear", "feature_map=favor", "decay=none", "favor.features=128"],
    "favor-fixed": ["kind=linear", "feature_map=favor", "decay=none", "favor.features=128", "favor.norms=fixed"],
    "elu": ["kind=linear", "feature_map=elu", "decay=none"],
    "elu-learned": ["kind=linear", "feature_map=elu", "decay=learned"],
}


def bits_per_byte(loaded: TrainedLanguageModel) -> float:
    """On all of the held-out text, in windows as long as those of training."""
    length, tokenizer = loaded.recipe.text.sequence_length, loaded.tokenizer
    text = scored_tokens(validation_text(loaded).tokens, tokenizer.bos, tokenizer.eos)
    batches = validation_batches(text, length, 16)
    tensors = (tuple(torch.from_numpy(part) for part in batch) for batch in batches)
    return loss_totals(loaded.model, tensors, torch.from_numpy(tokenizer.token_bytes)).bits_per_byte  # type: ignore[arg-type]


def overrides(name: str) -> list[str]:
    return ["model.positions=rotary", *(f"model.attention.{option}" for option in ATTENTIONS[name])]


def swapped(run: str, name: str) -> TrainedLanguageModel:
    """The run's model with another attention, not trained further."""
    base = load(run, "cpu")
    recipe = recipe_file.load(str(base.checkpoint / "recipe.yaml"), overrides(name))
    torch.manual_seed(recipe.seed)
    model = LanguageModel(recipe.model, base.tokenizer.vocabulary)
    read.load_weights(model, base.checkpoint, new_attention=True)
    return TrainedLanguageModel(model.eval(), base.tokenizer, recipe, base.checkpoint)


def after(run: str, name: str, steps: int, rate: float, out: Path) -> float:
    """Bits per byte after so many steps from the run's weights."""
    folder = out / f"{name}-{steps}"
    options = [*overrides(name), f"training.init_from={run}", f"training.steps={steps}", "training.tokens=null",
               f"training.learning_rate={rate}", "training.warmup_steps=10"]  # fmt: skip
    recipe = recipe_file.load(str(read.find(run) / "recipe.yaml"), options)
    train(recipe, folder, resume="auto")
    validation = last_validation(read_entries(folder / "metrics.jsonl"))
    assert validation is not None, "a run validates after its last step"
    return validation["bits_per_byte"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--to", nargs="+", default=list(ATTENTIONS), choices=ATTENTIONS)
    parser.add_argument("--steps", nargs="+", type=int, default=[30, 100, 300])
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--out", type=Path, default=Path("runs/swap"))
    options = parser.parse_args()
    before = bits_per_byte(load(options.run, "cpu"))
    columns = ["attention", "before", "right after", *(f"{steps} steps" for steps in options.steps)]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for name in options.to:
        figures = [before, bits_per_byte(swapped(options.run, name))]
        figures += [after(options.run, name, steps, options.rate, options.out) for steps in options.steps]
        print(f"| {name} | {' | '.join(f'{figure:.3f}' for figure in figures)} |", flush=True)


if __name__ == "__main__":
    main()
