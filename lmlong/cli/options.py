"""Options that several commands have."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from lmlong.cli import completion
from lmlong.errors import UsageError

Command = TypeVar("Command", bound=Callable[..., Any])
Option = Callable[[Command], Command]

OutFile = click.Path(dir_okay=False, writable=True, allow_dash=True, path_type=Path)


class NewFile(click.Path):
    """A file to write, of which is told at once where it cannot be, and not after hours."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from lmlong.cli.output import check_writable

        path = Path(str(super().convert(value, param, ctx)))
        if ctx is None or not ctx.resilient_parsing:
            check_writable(path)
        return path


class InFile(click.Path):
    """A file to read, which must be there: told before torch is imported."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(str(super().convert(value, param, ctx)))
        try:
            path.stat()
        except OSError as error:
            raise UsageError(f"{path}: cannot be read ({error.strerror}). Name a file that is there.") from None
        return path


class SeekableFile(InFile):
    """A file to read that must be an ordinary one: a pipe, whose end may never come, cannot be read from anywhere."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from lmlong.io.files import check_ordinary

        path: Path = super().convert(value, param, ctx)
        try:
            check_ordinary(path)
        except OSError as error:
            raise UsageError(f"{path}: cannot be read ({error.strerror}). Name an ordinary file.") from None
        return path


class Run(click.ParamType):
    """A run folder, the name of a run, or a checkpoint, which must be there: told before torch is imported."""

    name = "run"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from lmlong.checkpoint.location import find

        find(value)
        return str(value)


run = click.argument("run", metavar="RUN", type=Run(), shell_complete=completion.runs)

runs = click.argument("runs", metavar="RUN...", type=Run(), nargs=-1, required=True, shell_complete=completion.runs)

any_run = click.argument("run", metavar="[RUN]", type=Run(), required=False, shell_complete=completion.runs)

overrides = click.argument("overrides", nargs=-1, metavar="[KEY.PATH=VALUE ...]", shell_complete=completion.overrides)


def recipe(name: str = "recipe", **settings: Any) -> Option:
    """Return the argument of a command that takes a recipe, by the name of a shipped one or by its file."""
    return click.argument(name, shell_complete=completion.recipes, **settings)


def _set_threads(context: click.Context, option: click.Parameter, threads: int | None) -> None:
    from lmlong.native.threads import set_threads, spare_busy_cores

    if threads is not None and not context.resilient_parsing:
        set_threads(threads)
    spare_busy_cores()


threads = click.option(
    "--threads",
    type=click.IntRange(1, 1024),
    callback=_set_threads,
    expose_value=False,
    help="Threads of the CPU to compute with.  [default: one for each core]",
)


def _found(context: click.Context, option: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    """Return the paths of files, with standard input in one of them."""
    from lmlong.io.standard_input import path_of

    return value if context.resilient_parsing else tuple(map(path_of, value))


data = click.option(
    "--data",
    multiple=True,
    metavar="FILE",
    callback=_found,
    help="Measure on this file, folder or glob, or on - for standard input; repeatable.",
)


class Length(click.ParamType):
    """A number of tokens, at least `least`, which may be written as 4k or 1m."""

    name = "length"

    def __init__(self, least: int):
        self.least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from lmlong.recipe.lengths import parse_length, too_long

        length = parse_length(value) if isinstance(value, str) else value
        if length is None and str(value).lstrip("-").isdecimal():
            length = int(value)
        if length is None:
            self.fail(f"{value!r} is no length. Write a whole number, or such as 4k or 1m (k is 1,024).", param, ctx)
        if length < self.least:
            self.fail(f"{value} is below {self.least}.", param, ctx)
        if why := too_long(length):
            self.fail(f"{str(value)[:40]} is {why}.", param, ctx)
        return length


tokens = click.option(
    "--tokens", type=Length(2), metavar="N", help="Read only so many tokens of the text, such as 64k."
)

json_file = click.option(
    "--json", "json_file", type=OutFile, help="Write the results as JSON; - for standard output, alone."
)


DEVICES = click.Choice(["auto", "cpu", "cuda", "mps"])

device = click.option("--device", type=DEVICES, default="auto", show_default=True)

weights = click.option(
    "--weights",
    type=click.Choice(["32", "bf16", "int8"]),
    default="32",
    show_default=True,
    help="How matrices are kept: bf16 takes half the memory, int8 a quarter, and both less time for a token.",
)

precision = click.option(
    "--precision",
    type=click.Choice(["auto", "32", "bf16", "16"]),
    default="auto",
    show_default=True,
    help="Number format of the forward pass. auto is the one that the run was trained in, where this machine computes "
    "in it, otherwise 32.",
)

state_dtype = click.option(
    "--state-dtype",
    type=click.Choice(["32", "64"]),
    default="32",
    show_default=True,
    help="How S and z are kept: 64 for texts of more than some ten million tokens.",
)


def plot(what: str) -> Option:
    """Return the option --plot of a command that draws `what`."""
    return click.option("--plot", type=OutFile, help=f"Draw {what}: .png, .pdf or .svg.")


def out(default: str) -> Option:
    """Return the option --out of an experiment that keeps its results."""
    folder = click.Path(file_okay=False, path_type=Path)
    return click.option("--out", type=folder, help=f"Folder of the results.  [default: {default}]")


def together(*options: Option) -> Option:
    """Return several options as one decorator, in the order of `--help`."""

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add
