"""`lmlong info`: describe this installation, or a run."""

import platform
import textwrap
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click

from lmlong.cli import options
from lmlong.cli.output import near, show_facts
from lmlong.report.progress import waiting
from lmlong.report.table import in_words

WIDTH = 80
BLOCKS = "tokens read as one by layer"
PACKAGES = ("lmlong", "torch", "lightning", "deepspeed", "sentencepiece")


@click.command()
@options.any_run
@options.json_file
@options.plugin
def info(run: str | None, json_file: Path | None) -> None:
    """Describe this installation or, with RUN, a trained model.

    \b
    Example: the installation, then a run.
      lmlong info
      lmlong info runs/quickstart --json
    """
    facts = _run(run) if run is not None else _installation()
    show_facts(_lines(_in_short(facts)), facts, json_file)


def _installation() -> dict[str, Any]:
    import torch

    from lmlong.decode.libraries import describe_libraries
    from lmlong.model.device import computes_in_bf16, pick_device
    from lmlong.native.build import find_compiler

    device = pick_device("auto")
    with waiting("loading native code"):
        native = describe_libraries()
    return {
        "python": platform.python_version(),
        **{package: _version(package) for package in PACKAGES},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "computes in bf16": computes_in_bf16(device),
        "C++ compiler": find_compiler(),
        "native code": native,
    }


def _run(run: str) -> dict[str, Any]:
    from lmlong.evaluation.run_facts import run_facts
    from lmlong.inference.loading import open_run

    return run_facts(open_run(run, "cpu"))


def _in_short(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the facts for a reader: a short path, sizes with units, a loss by token and byte only, and blocks where
    there are any."""
    from lmlong.model.state_size import binary_size

    shown: dict[str, Any] = {name: binary_size(value) if "bytes" in name else value for name, value in facts.items()}
    saved = "state bytes with --learn" if facts.get("learns by default") else "state bytes"
    if saved in shown:
        shown[saved] += ", saved by default"
    if "checkpoint" in shown:
        shown["checkpoint"] = near(shown["checkpoint"])
    if validation := shown.get("validation"):
        shown["validation"] = {name: value for name, value in validation.items() if name != "nats"}
    if set(shown.get(BLOCKS, [])) == {1}:
        del shown[BLOCKS]
    return shown


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _lines(facts: dict[str, Any]) -> str:
    """Format facts as lines of up to 80 columns; a longer path is not broken."""
    width = max(map(len, facts)) + 2
    return "\n".join(_wrapped(f"{name:<{width}}", in_words(value)) for name, value in facts.items())


def _wrapped(name: str, value: str) -> str:
    lines = textwrap.wrap(value, WIDTH - len(name), break_long_words=False, break_on_hyphens=False)
    return "\n".join(f"{name if number == 0 else '':<{len(name)}}{line}" for number, line in enumerate(lines or [""]))
