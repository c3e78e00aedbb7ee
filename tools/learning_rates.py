"""Which learning rate is best at which width: a recipe trained at several of both, as a table and a plot.

    python tools/learning_rates.py recipe.yaml --widths 96,192,384 --rates 6e-3,12e-3,24e-3 --out runs/rates

The heads keep their size, so a wider model has more. A run that is there already is not trained again. With `--jobs 2`
two runs share the machine, each with one thread.
"""

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lmlong.recipe import file as recipe_file
from lmlong.report import plot
from lmlong.report.figure import Figure, Line, Panel, style
from lmlong.training.metrics_log import last_validation, read_entries

Results = dict[int, dict[float, float]]
"""Bits per byte by width and learning rate."""


def main(options: argparse.Namespace) -> None:
    """Train what is not trained yet, print the table, draw the plot."""
    widths = [int(width) for width in options.widths.split(",")]
    rates = sorted(float(rate) for rate in options.rates.split(","))
    with ThreadPoolExecutor(options.jobs) as pool:
        runs = {(w, r): pool.submit(trained, options, w, r) for w in sorted(widths, reverse=True) for r in rates}
        found = {w: {r: runs[w, r].result() for r in rates} for w in widths}
    print(f"| width | {' | '.join(f'{rate:g}' for rate in rates)} |\n|{'---|' * (len(rates) + 1)}")
    for width, of_rates in found.items():
        best = min(of_rates.values())
        print(f"| {width} | {' | '.join(f'**{x:.3f}**' if x == best else f'{x:.3f}' for x in of_rates.values())} |")
    if options.plot:
        plot.save(figure(found), options.plot)


def trained(options: argparse.Namespace, width: int, rate: float) -> float:
    """Return the bits per byte of one run, which a process of its own trains."""
    folder = options.out / f"width-{width}-rate-{rate:g}"
    own = recipe_file.load(options.recipe, options.overrides).model
    heads = max(own.heads * width // own.width, 1)
    changes = [f"model.width={width}", f"model.heads={heads}", f"training.learning_rate={rate}"]
    command = ["train", options.recipe, *options.overrides, *changes, "--out", str(folder), "--resume", "auto"]
    environment = {**os.environ, **({"OMP_NUM_THREADS": "1"} if options.jobs > 1 else {})}
    subprocess.run([sys.executable, "-m", "lmlong", *command], env=environment, check=True, stdout=subprocess.DEVNULL)
    validation = last_validation(read_entries(folder / "metrics.jsonl"))
    assert validation is not None
    return validation["bits_per_byte"]


def figure(found: Results) -> Figure:
    """Return the loss against the learning rate, a line for each width."""
    lines = [
        Line(f"width {width}", [1000 * rate for rate in of_rates], list(of_rates.values()), style(number))
        for number, (width, of_rates) in enumerate(found.items())
    ]
    ticks = sorted({round(1000 * rate) for of_rates in found.values() for rate in of_rates})
    panel = Panel(lines, "", "learning rate", "bits per byte", ticks, lambda tick: f"{tick / 1000:g}", legend=True)
    return Figure([[panel]], (6, 4))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--widths", required=True)
    parser.add_argument("--rates", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--plot", type=Path)
    main(parser.parse_args())
