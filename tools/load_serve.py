#!/usr/bin/env python
"""Drive a real `lmlong serve` as hard as clients can, from one other process, and tell what holds.

    tools/load_serve.py streams runs/quickstart --streams 1000 --rows 256
    tools/load_serve.py prompt runs/quickstart --bytes 5000000
    tools/load_serve.py vanish runs/quickstart --clients 100
    tools/load_serve.py prefix runs/quickstart --prompts 1000
    tools/load_serve.py malformed runs/quickstart --requests 10000
    tools/load_serve.py kill runs/quickstart --kills 50
    tools/load_serve.py sessions runs/linear --sessions 10000 --memory 16m

The last is about a state of 160 KB: lmlong train quickstart model.attention.kind=linear --out runs/linear

Each starts servers of its own, on free ports of this machine, which it needs quiet: figures are of the server and of
the client beside it, whose processor time is told. Texts are cut from the standard library of Python. Exits 1 if
anything is wrong; a figure that is missed is told, for it may be the machine's. Needs Linux, whose /proc it reads.
"""

import argparse
import json
import signal
import sys
import time
from pathlib import Path

from load import kill, malformed, prefix, prompt, sessions, streams, vanish
from load.findings import Findings

COMMANDS = {
    "streams": streams,
    "prompt": prompt,
    "vanish": vanish,
    "prefix": prefix,
    "malformed": malformed,
    "sessions": sessions,
    "kill": kill,
}


def main() -> int:
    """Run one command, and print what it found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="|".join(COMMANDS), dest="command")
    for name, module in COMMANDS.items():
        meaning = str(module.__doc__)
        command = commands.add_parser(name, description=meaning, help=meaning.partition("\n\n")[0])
        command.add_argument("run", metavar="RUN", help="a run folder")
        command.add_argument("--threads", type=int, default=1, help="of the server, and of lmlong generate")
        command.add_argument("--seed", type=int, default=0, help="of what is drawn")
        command.add_argument("--json", type=Path, metavar="FILE", help="write what was found there too")
        module.add_options(command)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that servers are ended too
    options, found, begun = parser.parse_args(), Findings(), time.monotonic()
    COMMANDS[options.command].measure(options, found)
    found.tell("all this took", time.monotonic() - begun, "s")
    print("\n".join(found.lines()))
    if options.json:
        options.json.write_text(json.dumps({"command": options.command, **found.body}, indent=2) + "\n")
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
