#!/usr/bin/env python
"""Load tests of a real `lmlong serve`, driven from one other process.

    tools/load_serve.py malformed runs/quickstart --requests 10000
    tools/load_serve.py kill runs/quickstart --kills 50

Each command starts its own servers on free ports. The machine should be quiet, because the client runs beside the
server. Exits 1 if there is a fault. Needs Linux, because it reads /proc.
"""

import argparse
import json
import signal
import sys
import time
from pathlib import Path

from load import kill, malformed
from load.findings import Findings

COMMANDS = {"malformed": malformed, "kill": kill}


def main() -> int:
    """Run one command and print its findings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="|".join(COMMANDS), dest="command")
    for name, module in COMMANDS.items():
        meaning = str(module.__doc__)
        command = commands.add_parser(name, description=meaning, help=meaning.partition("\n\n")[0])
        command.add_argument("run", metavar="RUN", help="a run folder")
        command.add_argument("--threads", type=int, default=1, help="of the server")
        command.add_argument("--seed", type=int, default=0, help="of the random requests")
        command.add_argument("--json", type=Path, metavar="FILE", help="write the findings to a file too")
        module.add_options(command)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that the servers end too
    options, findings, begun = parser.parse_args(), Findings(), time.monotonic()
    COMMANDS[options.command].measure(options, findings)
    findings.add("total time", time.monotonic() - begun, "s")
    print("\n".join(findings.lines()))
    if options.json:
        options.json.write_text(json.dumps({"command": options.command, **findings.body}, indent=2) + "\n")
    return 1 if findings.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
