#!/usr/bin/env python
"""How well `lmlong score --by line` finds anomalies that were planted in a made-up log of a service.

    python tools/planted_anomalies.py write normal.log --lines 40000 --seed 1
    lmlong train logs text.sources.0.paths=normal.log
    python tools/planted_anomalies.py measure runs/logs --normal normal.log --plot anomalies.png

`write` writes a log, with --each anomalies of every kind where that is not 0, whose lines go to --truth. `measure`
makes such a log of another seed and reads it with each RUN. Beside the z of a line, as the command tells it, stand
those of its bits per byte and of its bits, and two baselines: how far a line's length is from the usual, and how rare
its template is, with numbers masked, among the lines of --normal and those so far. For each method the last line is at
the threshold with the best F1, which only who knows the anomalies could choose; "average" is its average precision. The
two baselines need no model.
"""

import argparse
import json
from pathlib import Path

import torch
from planted_parts.anomalies import compare_methods, figure, table, to_json
from planted_parts.service_log import write_log

from lmlong.cli.output import check_writable, show
from lmlong.errors import LmlongError
from lmlong.inference.loading import load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="write|measure")
    write = commands.add_parser("write", help="write a log")
    write.add_argument("file", type=Path)
    write.add_argument("--lines", type=int, default=40_000)
    write.add_argument("--seed", type=int, default=1)
    write.add_argument("--each", type=int, default=0, help="anomalies of each kind")
    write.add_argument("--truth", type=Path, help="write kinds and lines of the anomalies to this file, as JSON")
    write.set_defaults(call=write_files)
    measure = commands.add_parser("measure", help="find the anomalies of a log")
    measure.add_argument("runs", nargs="*", metavar="RUN")
    measure.add_argument("--normal", type=Path, required=True, help="the log that the runs were trained on")
    measure.add_argument("--lines", type=int, default=12_000)
    measure.add_argument("--seed", type=int, default=7)
    measure.add_argument("--each", type=int, default=10, help="anomalies of each kind")
    measure.add_argument("--above", type=float, nargs="*", default=[4.0, 8.0], help="thresholds of z")
    measure.add_argument("--json", type=Path)
    measure.add_argument("--plot", type=Path)
    measure.set_defaults(call=measure_runs)
    options = parser.parse_args()
    try:
        options.call(options)
    except LmlongError as error:
        parser.exit(error.exit_code, f"{error}\n")


def write_files(options: argparse.Namespace) -> None:
    log = write_log(options.lines, options.seed, options.each)
    options.file.write_text(log.text, encoding="utf-8")
    if options.truth:
        options.truth.write_text(json.dumps([one._asdict() for one in log.planted], indent=2) + "\n")


def measure_runs(options: argparse.Namespace) -> None:
    for file in filter(None, (options.json, options.plot)):
        check_writable(file)
    torch.set_num_threads(1)
    log = write_log(options.lines, options.seed, options.each)
    normal = options.normal.read_text(encoding="utf-8").splitlines()
    models = {Path(run).name: load(run) for run in options.runs}
    found = compare_methods(models, log, normal, options.above)
    show(table(found, log), to_json(found, log), options.json, options.plot, figure(found, log))


if __name__ == "__main__":
    main()
