"""The options of sampling on a command line, with the defaults of `Sampling`."""

from typing import Any

import click

from lmlong.cli import options
from lmlong.model.sampling_options import DEFAULTS, LOOP_PENALTY, Sampling, random_seed

sampling_flags = options.together(
    click.option(
        "--temperature",
        default=DEFAULTS.temperature,
        show_default=True,
        help="Below 1 likely tokens become likelier; 0 always takes the likeliest.",
    ),
    click.option("--top-k", default=DEFAULTS.top_k, type=int, help="Draw only from this many likeliest tokens."),
    click.option(
        "--top-p",
        default=DEFAULTS.top_p,
        show_default=True,
        help="Draw only from the fewest likeliest tokens that together have this probability.",
    ),
    click.option(
        "--min-p",
        default=DEFAULTS.min_p,
        show_default=True,
        help="Draw only from tokens at least this share as probable as the likeliest.",
    ),
    click.option(
        "--repetition-penalty",
        default=DEFAULTS.repetition_penalty,
        show_default=True,
        help="Above 1, makes tokens of the recent text, the prompt included, less likely.",
    ),
    click.option(
        "--repetition-window",
        default=DEFAULTS.repetition_window,
        show_default=True,
        help="Tokens of the recent text for --repetition-penalty.",
    ),
    click.option(
        "--loop-penalty",
        default=DEFAULTS.loop_penalty,
        type=float,
        help="Lowers tokens that would repeat the end of the generated text a third time in a row; 0 turns it off.  "
        f"[default: {LOOP_PENALTY}; 0 at temperature 0]",
    ),
    click.option(
        "--seed",
        type=int,
        help="The same seed draws the same text.  [default: a random one, which --stats and --json show]",
    ),
)


def sampling_of(flags: dict[str, Any]) -> Sampling:
    """Return the options that flags name, with a random seed where none is given."""
    return Sampling(**flags | {"seed": random_seed() if flags["seed"] is None else flags["seed"]})
