"""The message at the end of a training run."""

from lmlong.training.run import TrainingResult


def after_training(result: TrainingResult) -> str:
    """Return the result and what to try next, or the step of a stopped run."""
    found = result.validation
    if found is None and result.signal is None:
        return f"{result.run} is at step {result.step} and has no more to do. Raise training.steps to go on."
    if found is None:
        return f"stopped after step {result.step}, saved in {result.run}. Go on with --resume auto."
    if result.gzip is None:
        lines = [f"validation   perplexity {found.perplexity:.3f} on {found.tokens:,} hidden tokens of held-out text"]
        further = [f"  lmlong eval {result.run}"]
    else:
        lines = [
            f"validation   {found.bits_per_byte:.3f} bits per byte on all {found.bytes:,} bytes of held-out text",
            f"gzip -9      {result.gzip:.3f} bits per byte on the same bytes",
        ]
        further = [f"  lmlong generate {result.run}", f"  lmlong eval {result.run}"]
    return "\n".join([*lines, "", "next:", *further])
