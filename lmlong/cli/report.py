"""The message at the end of a training run."""

from lmlong.data.baselines import Baselines
from lmlong.training.run import TrainingResult


def after_training(result: TrainingResult) -> str:
    """Return the result and what to try next, or the step of a stopped run."""
    found = result.validation
    if found is None and result.signal is None:
        more = "Raise training.steps, tokens or minutes to go on."
        return f"{result.run} is at step {result.step} and has no more to do. {more}"
    if found is None:
        return f"stopped after step {result.step}, saved in {result.run}. Go on with --resume auto."
    if result.baselines is None:
        lines = [f"validation   perplexity {found.perplexity:.3f} on {found.tokens:,} hidden tokens of held-out text"]
        further = [f"  lmlong eval {result.run}"]
    else:
        lines = [
            f"validation   {found.bits_per_byte:.3f} bits per byte on {_part(result)} of held-out text",
            *_baselines(result.baselines),
        ]
        further = [f"  lmlong generate {result.run}", f"  lmlong eval {result.run}"]
    return "\n".join([*lines, "", "next:", *further])


def _part(result: TrainingResult) -> str:
    """Return the part of the held-out text that the last figure is of."""
    size = result.validation.bytes if result.validation else 0
    return f"an even sample of {size:,} bytes" if result.sampled else f"all {size:,} bytes"


def _baselines(found: Baselines) -> list[str]:
    """Return a line for each baseline, with what it knows."""
    strongest, name = found.strongest, "mixing" if found.mixing else "lzma"
    how = "by context mixing, without a network" if found.mixing else "by repeated phrases"
    return [
        f"{name:12} {strongest.bits_per_byte:.3f} after {strongest.primed_bytes:,} bytes of the training text, {how}",
        f"unigram      {found.unigram:.3f} by how often each token occurs in the training text, without context",
        f"gzip -9      {found.gzip:.3f} on the held-out text alone, without the training text",
    ]
