"""lmlong bench attention, train, generate: how fast, and from which length on faster than softmax."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click

from lmlong.bench.speed_grid import ATTENTIONS, SHOWN, Grid, choose
from lmlong.cli import options

Command = TypeVar("Command", bound=Callable[..., Any])


def contest_options(lengths: str, precisions: str) -> Callable[[Command], Command]:
    """The options that all contests of speed have."""
    several = [
        click.option("--lengths", default=lengths, show_default=True, metavar="N,...", help="Tokens; k is 1,024."),
        click.option("--only", metavar="NAME,...", help=f"Attentions to compare.  [default: {','.join(SHOWN)}]"),
        click.option(
            "--precisions", default=precisions, show_default=True, metavar="FORMAT,...", help="Number formats."
        ),
        click.option(
            "--limit",
            metavar="SECONDS",
            default=300.0,
            show_default=True,
            type=click.FloatRange(min=0, min_open=True),
            help="Leave out what would take longer for one pass.",
        ),
        click.option("--threads", type=click.IntRange(1), help="Threads of the CPU.  [default: all]"),
        click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write all figures."),
        click.option(
            "--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw speeds: .png, .pdf or .svg."
        ),
        options.device,
    ]

    def add(command: Command) -> Command:
        for option in reversed(several):
            command = option(command)
        return command

    return add


def grid_of(lengths: str, only: str | None, precisions: str, known: tuple[str, ...], limit: float) -> Grid:
    from lmlong.lengths import parse_lengths

    names = choose("--only", only, SHOWN, tuple(ATTENTIONS))
    formats = choose("--precisions", precisions, known, known)
    return Grid(names, formats, tuple(parse_lengths(lengths)), limit)


@click.command()
@contest_options("1k,4k,16k", "32,bf16")
@click.option("--rows", default=1, show_default=True, type=click.IntRange(1), help="Texts side by side.")
@click.option("--heads", default=8, show_default=True, type=click.IntRange(1))
@click.option("--width", default=64, show_default=True, type=click.IntRange(2), help="Of a head.")
@click.option("--forward", is_flag=True, help="Without the backward pass.")
def attention(
    lengths: str,
    only: str | None,
    precisions: str,
    rows: int,
    heads: int,
    width: int,
    forward: bool,
    **common: Any,
) -> None:
    """Measure how fast each attention reads, alone, and from which length on it is faster than softmax.

    A forward and backward pass over queries, keys and values; softmax is torch's own. All have their turn in every
    round.

    \b
    Example: up to 64k tokens, where softmax takes its time.
      lmlong bench attention --lengths 1k,4k,16k,64k
    """
    grid = grid_of(lengths, only, precisions, ("32", "bf16", "64"), common["limit"])
    place = _place(common)

    from lmlong.bench.attention_speed import Shape, contender
    from lmlong.bench.contest_report import Title

    shape = Shape(rows, heads, width, forward)
    passes = "forward" if forward else "forward and backward"
    title = Title(
        f"attention alone, {passes}, {rows} x {heads} heads of width {width}",
        _machine(place),
        "peak memory, as a multiple of inputs, outputs" + ("" if forward else " and gradients"),
        lambda one: one.peak / one.least,
    )
    _run(grid, partial(contender, shape=shape, device=place), place, title, {"shape": shape._asdict()}, common)


@click.command()
@click.argument("recipe", default="quickstart")
@click.argument("overrides", nargs=-1, metavar="[KEY.PATH=VALUE ...]")
@contest_options("2k,8k", "bf16")
def train(
    recipe: str, overrides: tuple[str, ...], lengths: str, only: str | None, precisions: str, **common: Any
) -> None:
    """Measure how fast the model of RECIPE learns, with one attention after another.

    A whole training step on one row of drawn tokens: forward and backward pass, clipping, AdamW. RECIPE gives all but
    the attention, the text and the length.

    \b
    Example: where softmax falls behind.
      lmlong bench train quickstart --lengths 2k,8k,32k --only softmax,elu-learned
    """
    grid = grid_of(lengths, only, precisions, ("32", "bf16"), common["limit"])
    chosen, place = _recipe(recipe, overrides), _place(common)

    from lmlong.bench.contest_report import Title
    from lmlong.bench.model_speed import learner

    title = Title(
        f"a training step of {_shape(chosen)}",
        _machine(place),
        "MB held beside weights and AdamW's",
        lambda one: one.peak / 1e6,
    )
    _run(grid, partial(learner, options=chosen, device=place), place, title, {"recipe": recipe}, common)


@click.command()
@click.argument("recipe", default="quickstart")
@click.argument("overrides", nargs=-1, metavar="[KEY.PATH=VALUE ...]")
@contest_options("128,1k,8k", "32,bf16,int8")
@click.option(
    "--compile/--no-compile", "compiled", default=True, help="Constant states by native code, or a CUDA graph."
)
def generate(
    recipe: str,
    overrides: tuple[str, ...],
    lengths: str,
    only: str | None,
    precisions: str,
    compiled: bool,
    **common: Any,
) -> None:
    """Measure how fast the model of RECIPE writes after texts of growing length, with one attention after another.

    One text, token by token; what was read before is not timed. Formats are those in which matrices are kept.

    \b
    Example: a constant state beside one that grows.
      lmlong bench generate quickstart --lengths 128,8k --only softmax,elu-learned
    """
    grid = grid_of(lengths, only, precisions, ("32", "bf16", "int8"), common["limit"])
    chosen, place = _recipe(recipe, overrides), _place(common)

    from lmlong.bench.contest_report import Title
    from lmlong.bench.model_speed import Writers

    steps = ", constant states compiled" if compiled else ""
    title = Title(f"writing with {_shape(chosen)}{steps}", _machine(place), "MB of state", lambda one: one.peak / 1e6)
    _run(grid, Writers(chosen, place, compiled).contender, place, title, {"recipe": recipe}, common)


def _recipe(name: str, overrides: tuple[str, ...]) -> Any:
    from lmlong.recipe import file as recipe_file

    return recipe_file.load(name, overrides)


def _shape(chosen: Any) -> str:
    model = chosen.model
    return f"{model.layers} layers of width {model.width}, vocabulary {chosen.text.tokenizer.vocabulary:,}"


def _place(common: dict[str, Any]) -> Any:
    """The device, with the threads that were asked for; what could not be drawn is refused before."""
    from lmlong.charts import check_format

    if common["plot"]:
        check_format(common["plot"])

    import torch

    from lmlong.model.device import pick_device

    if common["threads"]:
        torch.set_num_threads(common["threads"])
    return pick_device(common["device"])


def _machine(place: Any) -> str:
    from lmlong.bench.cost import machine

    return machine(place)


def _run(grid: Grid, build: Any, place: Any, title: Any, settings: dict[str, Any], common: dict[str, Any]) -> None:
    """Hold the contest and show what came of it."""
    from lmlong.bench.contest import contest
    from lmlong.bench.contest_report import draw, plain, table

    results = contest(build, grid.names, grid.precisions, grid.lengths, place, grid.limit)
    if common["json_file"]:
        text = json.dumps(plain(title, settings, results), indent=2)
        common["json_file"].write_text(text + "\n", encoding="utf-8")
    if common["plot"]:
        draw(title, results, common["plot"])
    click.echo(table(title, results))
