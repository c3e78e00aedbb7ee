"""The child process of a dry run: it takes steps of a run, and prints what they take as lines of JSON.

It reads the longest batch of the run, first cut to a few tokens, then to twice as many, up to its whole length, and
takes two steps on each. So something is known if a longer batch takes too long, or if the system kills the process.
"""

import json
import os
import sys
from collections.abc import Iterator
from threading import Timer
from typing import Any

from lightning.pytorch import Callback, Trainer

from lmlong.attention.plugins import load_plugin
from lmlong.checkpoint import write
from lmlong.checkpoint.write import Contents
from lmlong.data.batches import evenly
from lmlong.errors import LmlongError
from lmlong.io.system_errors import lack_of_memory
from lmlong.model.base import count_in_tables, count_parameters
from lmlong.model.build import total_memory
from lmlong.model.device import describe_machine, peak_memory, synchronize
from lmlong.model.sequence_group import longest_part
from lmlong.recipe import Recipe
from lmlong.recipe import file as recipe_file
from lmlong.report.progress import waiting
from lmlong.training.dry_run import OUT_OF_MEMORY, OUT_OF_TIME, DryRun
from lmlong.training.loader import Loader, TrainingBatch
from lmlong.training.module import TrainingModule
from lmlong.training.optimizer import count_steps
from lmlong.training.prepare import PreparedRun, prepare_new_run
from lmlong.training.progress import CLOCKS, TICK
from lmlong.training.run import make_trainer
from lmlong.training.training_state import training_state

FIRST_TOKENS = 256
"""Maximum tokens of the first batch."""

FIRST_LIMIT = 90.0
"""Maximum seconds of its two steps, with one-time work such as compiling native code."""

SAMPLED = 512
"""Number of batches, spread evenly over the run, whose lengths are looked up."""

BATCHES = 2
"""Maximum batches of a step; those of a real one take their time in proportion."""


class MeasuredModule(TrainingModule):
    """Takes two steps on each of some lengths of a batch."""

    def __init__(self, prepared: PreparedRun, number: int, lengths: list[int]):
        super().__init__(prepared)
        self.number, self.lengths = number, lengths
        self.remaining_steps = 2 * len(lengths)

    def train_dataloader(self) -> Loader:
        return CutBatches(self.prepared, self.number, self.lengths)

    def in_last(self, share: float) -> bool:
        """Return whether what is done in the last steps of a run is done at all, so that it is measured."""
        return share > 0


class CutBatches(Loader):
    """One batch of a run, cut to each of some lengths, twice as often as a step has batches."""

    def __init__(self, prepared: PreparedRun, number: int, lengths: list[int]):
        super().__init__(prepared, range(number, number + 1), rank=0)
        self.lengths = [length for length in lengths for _ in range(2 * prepared.recipe.training.accumulate)]

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[TrainingBatch]:
        (batch,) = super().__iter__()
        for length in self.lengths:
            tokens, targets, mask = (part[:, :length].contiguous() for part in batch[:3])
            yield batch._replace(tokens=tokens, targets=targets, mask=mask)


class StepTimer(Callback):
    """Prints the result after the very first step, and after the second on each length. Ends the process if two steps
    take too long."""

    def __init__(self, recipe: Recipe, result: DryRun, mean: float):
        self.recipe, self.result, self.mean = recipe, result, mean
        self.now = CLOCKS[recipe.training.clock]
        self.begun = 0.0
        self.limit = _ends_after(FIRST_LIMIT)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.begun = self.now()
        if not self.recipe.training.compile:  # which may take minutes
            self.limit.start()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % pl_module.recipe.training.accumulate:
            return
        pl_module.take_figures()
        synchronize(pl_module.device)
        seconds = max(self.now() - self.begun, TICK)
        if pl_module.step == 1 or pl_module.step % 2 == 0:
            print(json.dumps(self.measured(pl_module, batch.tokens.shape[1], seconds)._asdict()), flush=True)
        self.begun = self.now()
        if pl_module.step % 2:
            return
        self.limit.cancel()
        if pl_module.step == pl_module.remaining_steps:
            return
        if 4 * seconds > self.result.limit_seconds:  # of two steps on the next length
            os._exit(OUT_OF_TIME)
        self.limit = _ends_after(self.result.limit_seconds)
        self.limit.start()

    def measured(self, module: TrainingModule, length: int, seconds: float) -> DryRun:
        """Return the result after a step that took `seconds`."""
        training, strategy = self.recipe.training, module.trainer.strategy
        step = seconds * training.accumulate / module.recipe.training.accumulate
        mean = step * self.mean / length
        steps = count_steps(training, self.recipe.tokens_per_step, module.prepared.tokens.train_tokens)
        if training.minutes is not None:
            steps = min(steps, max(1, round(60 * training.minutes / mean)))
        contents = Contents(
            strategy.lightning_module_state_dict(),
            training_state(module),
            recipe_file.dump(self.recipe),
            module.prepared.tokens.tokenizer.file,
        )
        return self.result._replace(
            length=length,
            step_seconds=step,
            peak_bytes=peak_memory(module.device),
            checkpoint_bytes=write.size(contents),
            steps=steps,
            run_seconds=steps * mean,
        )


def _ends_after(seconds: float) -> Timer:
    """Return a timer that ends the process."""
    timer = Timer(seconds, os._exit, [OUT_OF_TIME])
    timer.daemon = True
    return timer


def measure(recipe: Recipe, limit: float) -> None:
    """Take steps of a recipe in this process, and print what they take."""
    prepared = prepare_new_run(_alone(recipe))
    number, longest, mean = _lengths(recipe, prepared)
    result = DryRun(
        describe_machine(prepared.device),
        count_parameters(prepared.model),
        count_in_tables(prepared.model),
        recipe.training.accumulate,
        recipe.training.batch_size,
        longest,
        total_memory(prepared.device),
        limit,
    )
    print(json.dumps(result._asdict()), flush=True)
    module = MeasuredModule(prepared, number, _cuts(recipe, longest))
    with waiting("measuring steps"):
        make_trainer(module, [StepTimer(recipe, result, mean)]).fit(module)


def _alone(recipe: Recipe) -> Recipe:
    """Return the recipe of one of the processes of a run, without the others."""
    training = {
        "strategy": "auto",
        "sequence_parallel": 1,
        "accumulate": min(recipe.training.accumulate, BATCHES),
    }
    longest = longest_part(recipe.text.sequence_length, recipe.training.sequence_parallel)
    text = {"sequence_length": longest, "short_steps": 0}
    changed = {
        "training": recipe.training.model_copy(update=training),
        "text": recipe.text.model_copy(update=text),
        "devices": 1,
        "nodes": 1,
    }
    return recipe.model_copy(update=changed)


def _lengths(recipe: Recipe, prepared: PreparedRun) -> tuple[int, int, float]:
    """Return the number of the longest batch of a process, its length, and the mean length of all."""
    batches, options = prepared.data.training(), recipe.training
    passes = options.accumulate * count_steps(options, recipe.tokens_per_step, prepared.tokens.train_tokens)
    lengths = {number: batches.length(number, recipe.batches_at_once) for number in evenly(passes, SAMPLED)}
    number = max(lengths, key=lengths.__getitem__)
    return number, lengths[number], sum(lengths.values()) / len(lengths)


def _cuts(recipe: Recipe, longest: int) -> list[int]:
    """Return the lengths to which a batch is cut, the longest last. A compiled model is measured at that one only."""
    lengths, factor = [longest], recipe.model.factor
    while not recipe.training.compile and lengths[0] * recipe.training.batch_size > FIRST_TOKENS:
        shorter = lengths[0] // 2 // factor * factor
        if not shorter:
            break
        lengths.insert(0, shorter)
    return lengths


def main() -> None:
    """Measure the recipe on standard input; print an error as a line of JSON."""
    plugins, text, limit = json.load(sys.stdin)
    for plugin in plugins:
        load_plugin(plugin)
    try:
        measure(recipe_file.recipe_class().model_validate_json(text), limit)
    except LmlongError as error:
        print(json.dumps({"error": str(error), "exit_code": error.exit_code}), flush=True)
    except (MemoryError, RuntimeError) as error:
        if lack_of_memory(error) is None:
            raise
        sys.exit(OUT_OF_MEMORY)


if __name__ == "__main__":
    main()
