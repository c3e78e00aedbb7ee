"""The message at the end of a training run."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from textwrap import indent

from lmlong.checkpoint import manifest
from lmlong.checkpoint.location import BEST, LATEST, find
from lmlong.cli.output import near
from lmlong.data.baselines import Baselines
from lmlong.recipe import Files, Recipe
from lmlong.training.run import TrainingResult


def next_commands(run: Path, recipe: Recipe) -> list[str]:
    """Return the commands to try on the run of a recipe."""
    words = [str(run), *(word for plugin in recipe.plugins for word in ("--plugin", near(plugin)))]
    paths = [path for source in recipe.text.sources if isinstance(source, Files) for path in source.paths]
    if recipe.objective != "causal":
        commands = [["eval", *words], *([["serve", *words]] if recipe.label_names else [])]
    elif logs := [near(path) for path in paths if Path(path).suffix == ".log"]:
        commands = [["score", *words, logs[0], "--above", "8"], ["eval", *words]]
    else:
        commands = [["generate", *words], ["eval", *words]]
    return [shlex.join(["lmlong", *each]) for each in commands]


def under_next(commands: Sequence[str]) -> str:
    """Return commands as the last lines of a message."""
    return "\n".join(["next:", *(f"  {command}" for command in commands)])


def after_training(result: TrainingResult, sample: str = "", commands: Sequence[str] = (), resume: str = "") -> str:
    """Return the result, a sample of the model's text and the commands to try next, or the step of a stopped run and
    the command that resumes it."""
    validation = result.validation
    if validation is None and result.signal is None:
        more = "Raise training.steps, tokens, epochs or minutes to continue."
        return f"{result.run} is at step {result.step} and has no more to do. {more}"
    if validation is None:
        return f"stopped after step {result.step}, saved in {result.run}. Resume by: {resume}"
    if result.objective == "label":
        share = f"accuracy {validation.accuracy:.3f} ± {validation.accuracy_error:.3f}"
        lines = [f"validation   {share} on {validation.tokens:,} held-out documents"]
    elif result.baselines is None:
        hidden = f"{validation.tokens:,} hidden tokens of held-out text"
        lines = [f"validation   perplexity {validation.perplexity:.3f} on {hidden}"]
    else:
        lines = [
            f"validation   {validation.bits_per_byte:.3f} bits per byte on {_part(result)} of held-out text",
            *_baselines(result.baselines, validation.bits_per_byte),
        ]
        if not beats_unigram(result):
            lines += ["", "no sample: the model predicts no better than the frequency of each token. Train it longer."]
    lines += _got_worse(result)
    return "\n".join([*lines, *_sample(sample), *(["", under_next(commands)] if commands else [])])


def _got_worse(result: TrainingResult) -> list[str]:
    """Return lines for a run whose last validation is not its best."""
    best, last = (manifest.read(find(result.run, which)) for which in (BEST, LATEST))
    if best.validation is None or last.validation is None or last.validation <= best.validation:
        return []
    return [
        f"got worse    from {best.validation:.3f} after step {best.step:,} to {last.validation:.3f} in validation",
        f"             commands load step {best.step:,}, whose figures these are; the last is in checkpoints/latest;",
        "             train for fewer steps, on more text, or with a lower training.learning_rate",
    ]


def beats_unigram(result: TrainingResult) -> bool:
    """Return whether a causal model predicts better than the frequency of each token; otherwise its text is noise."""
    validation, baselines = result.validation, result.baselines
    return validation is not None and baselines is not None and validation.bits_per_byte < baselines.unigram


def _sample(text: str) -> list[str]:
    """Return the lines that show a model's text, without control characters."""
    shown = "".join(character if character.isprintable() or character in "\n\t" else "\ufffd" for character in text)
    return ["", "sample:", indent(shown.strip("\n"), "  ")] if shown.strip() else []


def _part(result: TrainingResult) -> str:
    """Return the part of the held-out text that was measured."""
    size = result.validation.bytes if result.validation else 0
    return f"an even sample of {size:,} bytes" if result.sampled else f"all {size:,} bytes"


HOW = {"PPMd": "PPMd of order 16", "lzma": "repeated phrases"}


def _baselines(baselines: Baselines, model: float) -> list[str]:
    """Return a line for each baseline, with the method and what it has read; and a line if one is better than the
    model."""
    lines = [
        f"{each.name:12} {each.bits_per_byte:.3f} by {HOW[each.name]}, "
        f"after {each.primed_bytes:,} bytes of training text"
        for each in baselines.primed
    ]
    lines += [
        f"unigram      {baselines.unigram:.3f} by the frequency of each token in the training text",
        f"gzip -9      {baselines.gzip:.3f} on the held-out text alone, without the training text",
    ]
    best = min(baselines.bits_per_byte, key=baselines.bits_per_byte.__getitem__)
    if baselines.bits_per_byte[best] < model:
        lines.append(f"             {best} needs fewer bits than the model: train longer, or on more text")
    return lines
