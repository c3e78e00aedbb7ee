"""The sampling options of a command, with the defaults of `Sampling`."""

from typing import Any

import click

from lmlong.cli import options
from lmlong.model.sampling_options import DEFAULTS, LOOP_PENALTY, Sampling, random_seed

sampling_flags = options.together(
    click.option(
        "--temperature",
        default=DEFAULTS.temperature,
        help="Values below 1 favor likely tokens; 0 always takes the most likely one.",
    ),
    click.option("--top-k", default=DEFAULTS.top_k, type=int, help="Sample from this many most likely tokens."),
    click.option(
        "--top-p",
        default=DEFAULTS.top_p,
        help="Sample from the smallest set of most likely tokens with this total probability.",
    ),
    click.option(
        "--min-p",
        default=DEFAULTS.min_p,
        help="Sample from tokens with at least this fraction of the highest probability.",
    ),
    click.option(
        "--repetition-penalty",
        default=DEFAULTS.repetition_penalty,
        help="Values above 1 make recent tokens less likely, including those of the prompt.",
    ),
    click.option(
        "--repetition-window",
        default=DEFAULTS.repetition_window,
        help="Number of recent tokens for --repetition-penalty.",
    ),
    click.option(
        "--loop-penalty",
        default=DEFAULTS.loop_penalty,
        type=float,
        help="Penalty for tokens that would repeat the end of the text a third time in a row; 0 disables it.  "
        f"[default: {LOOP_PENALTY}; 0 at temperature 0]",
    ),
    click.option(
        "--seed", type=int, help="The same seed gives the same text.  [default: random; --stats and --json print it]"
    ),
)


def sampling_of(flags: dict[str, Any]) -> Sampling:
    """Return the sampling options of `flags`, with a random seed if none is given."""
    return Sampling(**flags | {"seed": random_seed() if flags["seed"] is None else flags["seed"]})
