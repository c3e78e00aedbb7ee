#!/usr/bin/env python
"""What the second copies of planted repeats cost a model of bases, against their distance from the first.

    python tools/planted_repeats.py write genome.fa --bases 2m --seed 1
    lmlong train genome text.sources.0.paths=genome.fa
    python tools/planted_repeats.py measure runs/genome --plot repeats.png

`write` writes a FASTA file to train on, a third of it copies of what stood up to 6,000 bases before. `measure` makes a
sequence of another seed with segments of 192 bases that come again at each distance, --each exact and as many with one
base in twenty mutated, and reads it with each RUN along one state. Prints bits per base of first and second copies,
what a second one saves with its standard error over the repeats, and the cost of second ones with mutations. Without a
model each base costs two bits.
"""

import argparse
from pathlib import Path
from textwrap import wrap

import torch
from planted_parts.repeats import figure, plant_repeats, repeat_costs, table, to_json, training_sequence

from lmlong.cli.output import check_writable, show
from lmlong.errors import LmlongError
from lmlong.inference.loading import load
from lmlong.recipe.lengths import parse_length

DISTANCES = ["256", "1k", "4k", "16k", "64k", "100k"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="write|measure")
    write = commands.add_parser("write", help="write a sequence to train on")
    write.add_argument("file", type=Path)
    write.add_argument("--bases", type=parse_length, default=2 << 20)
    write.add_argument("--seed", type=int, default=1)
    write.set_defaults(call=write_file)
    measure = commands.add_parser("measure", help="measure what second copies cost")
    measure.add_argument("runs", nargs="+", metavar="RUN")
    measure.add_argument("--bases", type=parse_length, default=400 << 10)
    measure.add_argument("--distances", type=parse_length, nargs="+", default=[parse_length(one) for one in DISTANCES])
    measure.add_argument("--each", type=int, default=8, help="repeats at each distance, and as many with mutations")
    measure.add_argument("--seed", type=int, default=7)
    measure.add_argument("--json", type=Path)
    measure.add_argument("--plot", type=Path)
    measure.set_defaults(call=measure_runs)
    options = parser.parse_args()
    try:
        options.call(options)
    except LmlongError as error:
        parser.exit(error.exit_code, f"{error}\n")


def write_file(options: argparse.Namespace) -> None:
    bases = training_sequence(options.bases, options.seed)
    options.file.write_text(f">made-up, seed {options.seed}\n" + "\n".join(wrap(bases, 80)) + "\n", encoding="utf-8")


def measure_runs(options: argparse.Namespace) -> None:
    for file in filter(None, (options.json, options.plot)):
        check_writable(file)
    torch.set_num_threads(1)
    genome = plant_repeats(options.bases, options.distances, options.each, options.seed)
    found = [repeat_costs(load(run), genome, Path(run).name) for run in options.runs]
    show(table(found), to_json(found, len(genome.bases), options.seed), options.json, options.plot, figure(found))


if __name__ == "__main__":
    main()
