"""The message at the end of a training run."""

from lmlong.training.run import Outcome


def after_training(outcome: Outcome) -> str:
    """Return the result and what to try next, or the step of a stopped run."""
    found = outcome.validation
    if found is None and outcome.signal is None:
        return f"{outcome.folder} is at step {outcome.step} and has no more to do. Raise training.steps to go on."
    if found is None:
        return f"stopped after step {outcome.step}, saved in {outcome.folder}. Go on with --resume auto."
    if outcome.gzip is None:
        result = [f"validation   perplexity {found.perplexity:.3f} on {found.tokens:,} hidden tokens of held-out text"]
        further = [f"  lmlong eval {outcome.folder}"]
    else:
        result = [
            f"validation   {found.bits_per_byte:.3f} bits per byte on all {found.bytes:,} bytes of held-out text",
            f"gzip -9      {outcome.gzip:.3f} bits per byte on the same bytes",
        ]
        further = [f"  lmlong generate {outcome.folder}", f"  lmlong eval {outcome.folder}"]
    return "\n".join([*result, "", "next:", *further])
