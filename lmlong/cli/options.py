"""Arguments and options that several commands share."""

import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from lmlong.cli import completion
from lmlong.cli.output import STDOUT, check_writable
from lmlong.errors import UsageError, nearest

if TYPE_CHECKING:
    from lmlong.recipe import Recipe

Command = TypeVar("Command", bound=Callable[..., Any])
Decorator = Callable[[Command], Command]
Name = TypeVar("Name", bound=str)


def together(*options: Decorator) -> Decorator:
    """Return several options as one decorator, in the order of `--help`."""

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


class NewFile(click.Path):
    """A file to write, whose name ends in one of `suffixes`, if there are any; one that cannot be written is refused
    before the work begins."""

    def __init__(self, *suffixes: str, **settings: Any) -> None:
        super().__init__(dir_okay=False, path_type=Path, **settings)
        self.suffixes = suffixes

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if self.suffixes and str(value) != str(STDOUT) and Path(str(value)).suffix.lower() not in self.suffixes:
            self.fail(f"{value!r} does not end in {' or '.join(self.suffixes)}.", param, ctx)
        path = Path(str(super().convert(value, param, ctx)))
        if ctx is None or not ctx.resilient_parsing:
            check_writable(path)
        return path


class JsonFile(NewFile):
    """A .json file, a device, or - for standard output. A name that looks like another argument is refused."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(str(value))
        if path != STDOUT and path.suffix != ".json" and (path.is_file() or not path.exists()):
            self.fail(f"{value!r} does not end in .json. Put a plain --json after the other arguments.", param, ctx)
        return super().convert(value, param, ctx)


class PlotFile(NewFile):
    """An image file to write."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from lmlong.report.plot import check_format

        path = super().convert(value, param, ctx)
        check_format(path)
        return path


class InFile(click.Path):
    """An existing file to read, checked before torch is imported."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(str(super().convert(value, param, ctx)))
        try:
            path.stat()
        except OSError as error:
            raise UsageError(f"{path}: cannot be read ({error.strerror}). Name an existing file.") from None
        return path


class TextFile(InFile):
    """A text to read: a file on disk or, by an hf:// path, on the Hugging Face Hub."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from lmlong.recipe.paths import is_on_hub, is_url

        if is_url(str(value)):
            raise UsageError(f"{value}: addresses are not read. Download the file, and name it.")
        if is_on_hub(str(value)):
            from lmlong.data.hub import local_file

            value = local_file(str(value))
        return super().convert(value, param, ctx)


class SeekableFile(InFile):
    """A regular file to read; a pipe is refused, since it is read at random positions and its end may never come."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from lmlong.io.files import check_ordinary

        path: Path = super().convert(value, param, ctx)
        try:
            check_ordinary(path)
        except OSError as error:
            raise UsageError(f"{path}: cannot be read ({error.strerror}). Name a regular file.") from None
        return path


def _existing_run(run: str) -> str:
    """Return an existing run folder, name of a run, or checkpoint, checked before torch is imported."""
    from lmlong.checkpoint.location import choice

    if line := choice(run):
        click.echo(line, err=True)
    return run


def _run(*names: str, **settings: Any) -> Decorator:
    """Return the argument for one or several runs."""
    return click.argument(*names, type=_existing_run, shell_complete=completion.runs, **settings)


run = _run("run", metavar="RUN")

runs = _run("runs", metavar="RUN...", nargs=-1, required=True)

any_run = _run("run", metavar="[RUN]", required=False)

overrides = click.argument("overrides", nargs=-1, metavar="[KEY.PATH=VALUE ...]", shell_complete=completion.overrides)


def load_recipe(name: str, overrides: Sequence[str] = ()) -> "Recipe":
    """Load a recipe that the user has named, with the plug-ins that it names."""
    from lmlong.recipe import file

    return file.load(name, overrides, _load_plugin)


def recipe(name: str = "recipe", **settings: Any) -> Decorator:
    """Return the argument for a recipe: the name of a shipped recipe or a file."""
    return click.argument(name, shell_complete=completion.recipes, **settings)


def _set_threads(context: click.Context, option: click.Parameter, threads: int | None) -> None:
    from lmlong.native.threads import set_threads

    if threads is not None and not context.resilient_parsing:
        set_threads(threads)


threads = click.option(
    "--threads",
    type=click.IntRange(1, 1024),
    is_eager=True,  # before --plugin, which may import torch
    callback=_set_threads,
    expose_value=False,
    help="Number of CPU threads.  [default: one per core]",
)


def _with_standard_input(context: click.Context, option: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    """Replace - by the path of a file that holds standard input."""
    from lmlong.io.standard_input import path_of

    return value if context.resilient_parsing else tuple(map(path_of, value))


def _load_plugins(context: click.Context, option: click.Parameter, names: tuple[str, ...]) -> None:
    from lmlong.native.threads import spare_busy_cores

    spare_busy_cores()  # in each command that builds or loads a model, before torch is imported
    for name in () if context.resilient_parsing else names:  # a shell that completes a command runs nothing
        _load_plugin(name)


def _load_plugin(name: str) -> None:
    from lmlong.attention.plugins import load_plugin  # torch is imported only where there is a plug-in

    load_plugin(name)


plugin = click.option(
    "--plugin",
    multiple=True,
    metavar="FILE|NAME",
    expose_value=False,
    callback=_load_plugins,
    help="Attentions and feature maps of your own: a Python file, or an installed plug-in; repeatable.",
)


data = click.option(
    "--data",
    multiple=True,
    metavar="FILE",
    callback=_with_standard_input,
    help="File, folder or glob to measure on, hf://datasets/..., or - for standard input; repeatable.",
)


class TokenCount(click.ParamType):
    """A number of tokens such as 500, 4k or 1m, where k is 1,024 and m is 1,024 k; or `unlimited`, which becomes
    None, where there may be no limit."""

    name = "tokens"

    def __init__(self, least: int, or_unlimited: bool = False):
        self.least, self.or_unlimited = least, or_unlimited

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        from lmlong.recipe.lengths import parse_length, too_long

        if self.or_unlimited and value == "unlimited":
            return None
        length = parse_length(value) if isinstance(value, str) else value
        if length is None and str(value).lstrip("-").isdecimal():
            length = int(value)
        if length is None:
            self.fail(f"{value!r} is not a number of tokens. Write 500, 4k or 1m (k is 1,024).", param, ctx)
        if length < self.least:
            self.fail(f"{value} is less than {self.least}.", param, ctx)
        if why := too_long(length):
            self.fail(f"{str(value)[:40]} is {why}.", param, ctx)
        return length


class ByteSize(click.ParamType):
    """A number of bytes such as 4096, 16m or 1.5GB: k, m, g, KiB, MiB and GiB are binary, KB, MB and GB decimal."""

    name = "bytes"

    def __init__(self, least: int = 0):
        self.least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]+)?) ?([kmg]?)(i?b)?", str(value).lower(), re.ASCII)
        if match is None:
            self.fail(f"{str(value)[:40]!r} is not a size in bytes. Write 4096, 16m or 24GB.", param, ctx)
        base = 1000 if match[3] == "b" else 1024
        size = int(float(match[1]) * base ** ["", "k", "m", "g"].index(match[2]))
        if not self.least <= size < 1 << 60:
            self.fail(f"{value} is not between {self.least} bytes and {(1 << 30) - 1}g.", param, ctx)
        return size


tokens = click.option("--tokens", type=TokenCount(2), metavar="N", help="Use only the first N tokens, such as 64k.")

json_file = click.option(
    "--json",
    "json_file",
    is_flag=False,
    flag_value="-",
    type=JsonFile(writable=True, allow_dash=True),
    metavar="[FILE]",
    help="Print the results as JSON instead of text, or write them to FILE (.json).",
)


def _sorted_lengths(text: str) -> list[int]:
    from lmlong.recipe.lengths import parse_lengths

    return parse_lengths(text)


def lengths(help: str) -> Decorator:
    """Return the option --lengths, a list like 512,4k, which becomes a sorted list of numbers of tokens."""
    return click.option("--lengths", type=_sorted_lengths, metavar="N,...", help=help)


def parse_names(option: str, text: str, known: Collection[Name]) -> tuple[Name, ...]:
    """Return the names of a list like context,state, each once, in the order of the list."""
    names = {name: name for name in known}
    words = dict.fromkeys(word.strip() for word in text.split(","))
    for word in words:
        if word not in names:
            hint = nearest(word, known) or f" Known: {', '.join(known)}."
            raise UsageError(f"{option}: there is no '{word}'.{hint}")
    return tuple(names[word] for word in words)  # type: ignore[index]


device = click.option("--device", type=click.Choice(["auto", "cpu", "cuda", "mps"]), default="auto")

weights = click.option(
    "--weights",
    type=click.Choice(["32", "bf16", "int8", "int4"]),
    default="32",
    help="Storage of weight matrices: bf16 takes half the memory, int8 a quarter, int4 a sixth; all decode faster.",
)

precision = click.option(
    "--precision",
    type=click.Choice(["auto", "32", "bf16", "16"]),
    default="auto",
    callback=lambda context, option, name: None if name == "auto" else name,
    help="Number format of the forward pass. auto: the one that the run was trained in if this machine supports it, "
    "otherwise 32.",
)

state_dtype = click.option(
    "--state-dtype",
    type=click.Choice(["auto", "32", "64"]),
    default="auto",
    help="Format of states. auto: keys and values of softmax and window layers in bf16, recurrent sums in float32. 32: "
    "all in float32. 64: recurrent sums in float64, for texts of more than about ten million tokens.",
)


def plot(what: str) -> Decorator:
    """Return the option --plot, which draws `what`."""
    return click.option("--plot", type=PlotFile(writable=True), help=f"Plot {what} to a .png, .pdf or .svg file.")


run_out = click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), help="Run folder.  [default: runs/NAME]"
)


learn = click.option(
    "--learn/--no-learn",
    default=None,
    help="Let the output layer learn from each token after it is predicted, until the document ends.  "
    "[default: learn of the recipe]",
)


load_state = click.option(
    "--load-state",
    type=SeekableFile(),
    help="Continue from a state that `lmlong state build` or --save-state wrote.",
)

save_state = click.option(
    "--save-state", type=NewFile(), help="Save the state after all text that was read and written to this file."
)

loading = together(learn, weights, device, plugin)
"""The options of commands that load a language model; all but --plugin are arguments of `load`."""
