"""What is said at the end of a training run."""

from lmlong.training.run import Outcome


def after_training(outcome: Outcome) -> str:
    """The result and what to try next, or where a stopped run stands."""
    if outcome.validation is None or outcome.gzip is None:
        return f"stopped after step {outcome.step}, saved in {outcome.folder}. Go on with --resume auto."
    bits = outcome.validation.bits_per_byte
    return "\n".join(
        (
            f"validation   {bits:.3f} bits per byte on all {outcome.validation.bytes:,} bytes of held-out text",
            f"gzip -9      {outcome.gzip:.3f} bits per byte on the same bytes",
            "",
            "next:",
            f"  lmlong generate {outcome.folder}",
            f"  lmlong eval {outcome.folder}",
        )
    )
