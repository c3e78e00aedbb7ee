"""lmlong bench: the speed of attentions, and the length from which each is faster than softmax."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from lmlong.cli import lists, options
from lmlong.cli.lists import parse_names
from lmlong.cli.output import show
from lmlong.cli.plugins import load_recipe
from lmlong.recipe.candidates import candidates
from lmlong.recipe.kinds import plugin_candidates

if TYPE_CHECKING:
    import torch

    from lmlong.bench.speed import Build, Result
    from lmlong.recipe import Recipe


DEFAULT = ("softmax", "elu", "elu-learned", "favor", "window")
"""The attentions compared by default, and those of plug-ins."""


class SpeedGrid(NamedTuple):
    """What a speed benchmark measures, and where its results go."""

    names: tuple[str, ...]
    precisions: tuple[str, ...]
    lengths: list[int]
    device: "torch.device"
    limit: float  # seconds
    json_file: Path | None
    plot: Path | None

    @classmethod
    def parse(cls, formats: Sequence[str], only: str | None, precisions: str, device: str, **given: Any) -> "SpeedGrid":
        """Return the grid of the options of `speed_options`."""
        usual = (*DEFAULT, *plugin_candidates())
        names = parse_names("--only", only, candidates()) if only is not None else usual
        chosen = parse_names("--precisions", precisions, formats)

        from lmlong.model.device import pick_device

        return cls(names, chosen, device=pick_device(device), **given)


def speed_options(lengths: str, precisions: str) -> options.Decorator:
    """Return the options of all speed benchmarks."""
    return options.together(
        lists.lengths("Tokens; k is 1,024.", lengths),
        click.option("--only", metavar="NAME,...", help=f"Attentions to compare.  [default: {','.join(DEFAULT)}]"),
        click.option("--precisions", default=precisions, metavar="FORMAT,...", help="Number formats."),
        click.option(
            "--limit",
            metavar="SECONDS",
            default=300.0,
            type=click.FloatRange(min=0, min_open=True),
            help="Leave out a candidate where one pass would take longer.",
        ),
        options.threads,
        options.json_file,
        options.plot("speeds"),
        options.device,
    )


@click.group()
def bench() -> None:
    """Compare the speed of attentions, on this machine.

    \b
    Example: up to which length softmax is faster.
      lmlong bench attention --lengths 1k,4k,16k
    """


@bench.command()
@speed_options("1k,4k,16k", "32,bf16")
@click.option("--rows", default=1, type=click.IntRange(1), help="Texts in a batch.")
@click.option("--heads", default=8, type=click.IntRange(1))
@click.option("--width", default=64, type=click.IntRange(2), help="Width of a head.")
@click.option("--forward", is_flag=True, help="Without the backward pass.")
def attention(rows: int, heads: int, width: int, forward: bool, **common: Any) -> None:
    """Measure the speed of each attention alone, and the length from which it is faster than softmax.

    Times a forward and backward pass over queries, keys and values, in turns; softmax is torch's own.

    \b
    Example: up to 64k tokens, where softmax is slow.
      lmlong bench attention --lengths 1k,4k,16k,64k
    """
    grid = SpeedGrid.parse(("32", "bf16", "64"), **common)

    from lmlong.bench.candidates import AttentionShape, attention_candidate

    shape = AttentionShape(rows, heads, width, forward)
    passes = "forward" if forward else "forward and backward"
    work = f"attention alone, {passes}, {rows} x {heads} heads of width {width}"
    memory = "peak memory, as a multiple of inputs, outputs" + ("" if forward else " and gradients")
    build = partial(attention_candidate, shape=shape, device=grid.device)
    _run(grid, build, work, memory, lambda one: one.peak / one.least, {"shape": shape._asdict()})


@bench.command()
@options.recipe(default="quickstart")
@options.overrides
@speed_options("2k,8k", "bf16")
def train(recipe: str, overrides: tuple[str, ...], **common: Any) -> None:
    """Measure the training speed of the model of RECIPE with each attention.

    Times a whole training step on one row of random tokens: forward and backward pass, clipping, optimizer. RECIPE
    gives everything except the attention, the text and the length.

    \b
    Example: where softmax falls behind.
      lmlong bench train quickstart --lengths 2k,8k,32k --only softmax,elu-learned
    """
    chosen = load_recipe(recipe, overrides)
    grid = SpeedGrid.parse(("32", "bf16"), **common)

    from lmlong.bench.candidates import training_candidate

    work, memory = f"a training step of {_shape(chosen)}", "MB held beside weights and moments"
    build = partial(training_candidate, options=chosen, device=grid.device)
    _run(grid, build, work, memory, _megabytes, {"recipe": recipe})


@bench.command()
@options.recipe(default="quickstart")
@options.overrides
@speed_options("128,1k,8k", "32,bf16,int8,int4")
@click.option("--fast-decode/--no-fast-decode", default=True, help="Decode by native code, or a CUDA graph.")
def generate(recipe: str, overrides: tuple[str, ...], fast_decode: bool, **common: Any) -> None:
    """Measure the generation speed of the model of RECIPE with each attention, after texts of growing length.

    Times one text, token by token, without the prompt. The number formats are those of the weights.

    \b
    Example: a constant state against one that grows.
      lmlong bench generate quickstart --lengths 128,8k --only softmax,elu-learned
    """
    chosen = load_recipe(recipe, overrides)
    grid = SpeedGrid.parse(("32", "bf16", "int8", "int4"), **common)

    from lmlong.bench.candidates import GenerationCandidates

    steps = ", by native code or a CUDA graph" if fast_decode else ""
    work = f"generation with {_shape(chosen)}{steps}"
    build = GenerationCandidates(chosen, grid.device, fast_decode).candidate
    _run(grid, build, work, "MB of state", _megabytes, {"recipe": recipe})


def _megabytes(result: "Result") -> float:
    return result.peak / 1e6


def _shape(chosen: "Recipe") -> str:
    model = chosen.model
    return f"{model.layers} layers of width {model.width}, vocabulary {chosen.text.tokenizer.most_tokens:,}"


def _run(
    grid: SpeedGrid,
    build: "Build",
    work: str,
    memory: str,
    size: "Callable[[Result], float]",
    settings: dict[str, Any],
) -> None:
    """Run the benchmark and show its results."""
    from lmlong.bench.speed import Title, figure, run_benchmark, table, to_json
    from lmlong.model.device import describe_machine

    title = Title(work, describe_machine(grid.device), memory, size)
    results = run_benchmark(build, grid.names, grid.precisions, grid.lengths, grid.device, grid.limit)
    drawn = figure(results) if grid.plot else None
    show(table(title, results), to_json(title, settings, results), grid.json_file, grid.plot, drawn)
