"""Options that several commands have: how a trained model is loaded."""

import click

device = click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)

weights = click.option(
    "--weights",
    type=click.Choice(["32", "bf16", "int8"]),
    default="32",
    show_default=True,
    help="How matrices are kept: bf16 takes half the memory, int8 a quarter, and both less time for a token.",
)

sums = click.option(
    "--sums",
    type=click.Choice(["32", "64"]),
    default="32",
    show_default=True,
    help="How S and z are kept: 64 for texts of more than some ten million tokens.",
)
