"""The sampling options of a command, with the defaults of `Sampling`."""

from typing import Any

import click

from lmlong.cli import options
from lmlong.model.sampling_options import DEFAULTS, LOOP_PENALTY, Sampling, random_seed

FLAGS: dict[str, tuple[type, str]] = {
    "temperature": (float, "Values below 1 favor likely tokens; 0 always takes the most likely one."),
    "top_k": (int, "Sample from this many most likely tokens."),
    "top_p": (float, "Sample from the smallest set of most likely tokens with this total probability."),
    "min_p": (float, "Sample from tokens with at least this fraction of the highest probability."),
    "repetition_penalty": (float, "Values above 1 make recent tokens less likely, including those of the prompt."),
    "repetition_window": (int, "Number of recent tokens for --repetition-penalty."),
    "loop_penalty": (
        float,
        "Penalty for tokens that would repeat the end of the text a third time in a row; 0 disables it.  "
        f"[default: {LOOP_PENALTY}; 0 at temperature 0]",
    ),
    "ignore_eos": (bool, "Never end the document: continue the text up to --max-tokens or --stop."),
}
"""The type and the help of each option, by its name in `Sampling`."""

sampling_flags = options.together(
    *(
        click.option(
            f"--{name.replace('_', '-')}",
            default=getattr(DEFAULTS, name),
            type=kind,
            is_flag=kind is bool,
            help=text,
        )
        for name, (kind, text) in FLAGS.items()
    ),
    click.option(
        "--seed", type=int, help="The same seed gives the same text.  [default: random; --stats and --json print it]"
    ),
)


def sampling_of(flags: dict[str, Any]) -> Sampling:
    """Return the sampling options of `flags`, with a random seed if none is given."""
    return Sampling(**flags | {"seed": random_seed() if flags["seed"] is None else flags["seed"]})
