"""lmlong bench attention, train, generate: how fast, and from which length on faster than softmax."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from lmlong.bench.speed_grid import DEFAULT, SpeedGrid, attentions
from lmlong.cli import options
from lmlong.cli.lists import parse_names
from lmlong.cli.output import check_files, show
from lmlong.cli.plugins import load_recipe

if TYPE_CHECKING:
    import torch

    from lmlong.bench.speed import Build
    from lmlong.bench.speed_report import Title
    from lmlong.recipe import Recipe


class SpeedOptions(NamedTuple):
    """The options that all speed benchmarks have, as their user wrote them."""

    lengths: str
    only: str | None
    precisions: str
    limit: float
    json_file: Path | None
    plot: Path | None
    device: str


def speed_options(lengths: str, precisions: str) -> Callable[[options.Command], options.Command]:
    """Return the options of `SpeedOptions`."""
    return options.together(
        click.option("--lengths", default=lengths, show_default=True, metavar="N,...", help="Tokens; k is 1,024."),
        click.option("--only", metavar="NAME,...", help=f"Attentions to compare.  [default: {','.join(DEFAULT)}]"),
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
        options.threads,
        options.json_file,
        options.plot("speeds"),
        options.device,
    )


@click.command()
@speed_options("1k,4k,16k", "32,bf16")
@click.option("--rows", default=1, show_default=True, type=click.IntRange(1), help="Texts side by side.")
@click.option("--heads", default=8, show_default=True, type=click.IntRange(1))
@click.option("--width", default=64, show_default=True, type=click.IntRange(2), help="Of a head.")
@click.option("--forward", is_flag=True, help="Without the backward pass.")
def attention(rows: int, heads: int, width: int, forward: bool, **common: Any) -> None:
    """Measure how fast each attention reads, alone, and from which length on it is faster than softmax.

    A forward and backward pass over queries, keys and values; softmax is torch's own. All have their turn in every
    round.

    \b
    Example: up to 64k tokens, where softmax takes its time.
      lmlong bench attention --lengths 1k,4k,16k,64k
    """
    given = SpeedOptions(**common)
    grid, device = _grid(given, ("32", "bf16", "64")), _device(given)

    from lmlong.bench.attention_speed import AttentionShape, attention_candidate
    from lmlong.bench.speed_report import Title

    shape = AttentionShape(rows, heads, width, forward)
    passes = "forward" if forward else "forward and backward"
    title = Title(
        f"attention alone, {passes}, {rows} x {heads} heads of width {width}",
        _machine(device),
        "peak memory, as a multiple of inputs, outputs" + ("" if forward else " and gradients"),
        lambda one: one.peak / one.least,
    )
    build = partial(attention_candidate, shape=shape, device=device)
    _run(grid, build, device, title, {"shape": shape._asdict()}, given)


@click.command()
@options.recipe(default="quickstart")
@options.overrides
@speed_options("2k,8k", "bf16")
def train(recipe: str, overrides: tuple[str, ...], **common: Any) -> None:
    """Measure how fast the model of RECIPE learns, with one attention after another.

    A whole training step on one row of random tokens: forward and backward pass, clipping, optimizer. RECIPE gives all
    but the attention, the text and the length.

    \b
    Example: where softmax falls behind.
      lmlong bench train quickstart --lengths 2k,8k,32k --only softmax,elu-learned
    """
    given = SpeedOptions(**common)
    chosen = load_recipe(recipe, overrides)
    grid, device = _grid(given, ("32", "bf16")), _device(given)

    from lmlong.bench.model_speed import training_candidate
    from lmlong.bench.speed_report import Title

    title = Title(
        f"a training step of {_shape(chosen)}",
        _machine(device),
        "MB held beside weights and moments",
        lambda one: one.peak / 1e6,
    )
    build = partial(training_candidate, options=chosen, device=device)
    _run(grid, build, device, title, {"recipe": recipe}, given)


@click.command()
@options.recipe(default="quickstart")
@options.overrides
@speed_options("128,1k,8k", "32,bf16,int8")
@click.option("--fast-decode/--no-fast-decode", default=True, help="Decode by native code, or a CUDA graph.")
def generate(recipe: str, overrides: tuple[str, ...], fast_decode: bool, **common: Any) -> None:
    """Measure how fast the model of RECIPE writes after texts of growing length, with one attention after another.

    One text, token by token; reading the text before is not timed. Formats are those in which matrices are kept.

    \b
    Example: a constant state beside one that grows.
      lmlong bench generate quickstart --lengths 128,8k --only softmax,elu-learned
    """
    given = SpeedOptions(**common)
    chosen = load_recipe(recipe, overrides)
    grid, device = _grid(given, ("32", "bf16", "int8")), _device(given)

    from lmlong.bench.model_speed import GenerationCandidates
    from lmlong.bench.speed_report import Title

    steps = ", by native code or a CUDA graph" if fast_decode else ""
    work = f"writing with {_shape(chosen)}{steps}"
    title = Title(work, _machine(device), "MB of state", lambda one: one.peak / 1e6)
    build = GenerationCandidates(chosen, device, fast_decode).candidate
    _run(grid, build, device, title, {"recipe": recipe}, given)


def _grid(given: SpeedOptions, known: Sequence[str]) -> SpeedGrid:
    from lmlong.recipe.kinds import plugin_candidates
    from lmlong.recipe.lengths import parse_lengths

    usual = (*DEFAULT, *plugin_candidates())
    names = parse_names("--only", given.only, attentions()) if given.only is not None else usual
    formats = parse_names("--precisions", given.precisions, known)
    return SpeedGrid(names, formats, tuple(parse_lengths(given.lengths)), given.limit)


def _shape(chosen: "Recipe") -> str:
    model = chosen.model
    return f"{model.layers} layers of width {model.width}, vocabulary {chosen.text.tokenizer.most_tokens:,}"


def _device(given: SpeedOptions) -> "torch.device":
    """Return the device; files that cannot be written are refused before."""
    check_files(given.json_file, given.plot)

    from lmlong.model.device import pick_device

    return pick_device(given.device)


def _machine(device: "torch.device") -> str:
    from lmlong.model.device import describe_machine

    return describe_machine(device)


def _run(
    grid: SpeedGrid,
    build: "Build",
    device: "torch.device",
    title: "Title",
    settings: dict[str, Any],
    given: SpeedOptions,
) -> None:
    """Run the benchmark and show its results."""
    from lmlong.bench.speed import run_benchmark
    from lmlong.bench.speed_report import figure, table, to_json

    results = run_benchmark(build, grid.names, grid.precisions, grid.lengths, device, grid.limit)
    drawn = figure(results) if given.plot else None
    show(table(title, results), to_json(title, settings, results), given.json_file, given.plot, drawn)
