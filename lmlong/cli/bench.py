"""`lmlong bench`: the speed of attentions, and the length from which each is faster than softmax."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from lmlong.cli import options
from lmlong.cli.options import load_recipe, parse_names
from lmlong.cli.output import show
from lmlong.errors import UsageError
from lmlong.recipe.kinds import candidates, plugin_candidates

if TYPE_CHECKING:
    import torch

    from lmlong.bench.speed import Build, Result, Title
    from lmlong.recipe import Recipe

ATTENTIONS = ("softmax", "elu", "elu-learned", "favor", "window")
"""The attentions compared by default, and those of plug-ins."""


class Benchmark(NamedTuple):
    lengths: str  # by default
    precisions: tuple[str, ...]  # by default
    formats: tuple[str, ...]  # all number formats


BENCHMARKS = {
    "attention": Benchmark("1k,4k,16k", ("32", "bf16"), ("32", "bf16", "64")),
    "train": Benchmark("2k,8k", ("bf16",), ("32", "bf16")),
    "generate": Benchmark("128,1k,8k", ("32", "bf16", "int8", "int4"), ("32", "bf16", "int8", "int4")),
}


@click.command()
@click.argument("what", type=click.Choice(list(BENCHMARKS)))
@options.recipe(default="quickstart")
@options.overrides
@options.lengths("Tokens; k is 1,024.  [default: depends on what is measured]")
@click.option(
    "--only",
    metavar="NAME,...",
    help=f"Attentions to compare, of {', '.join(candidates())}.  [default: {','.join(ATTENTIONS)}]",
)
@click.option("--precisions", metavar="FORMAT,...", help="Number formats.  [default: depends on what is measured]")
@options.json_file
@options.plot("speeds")
@options.threads
@options.device
@options.plugin
def bench(
    what: str,
    recipe: str,
    overrides: tuple[str, ...],
    lengths: list[int] | None,
    only: str | None,
    precisions: str | None,
    json_file: Path | None,
    plot: Path | None,
    device: str,
) -> None:
    """Compare the speed of attentions on this machine, and find the length from which each is faster than softmax.

    \b
    attention  a forward and backward pass over queries, keys and values
    train      a training step on random tokens: passes, clipping, optimizer
    generate   text token by token, after prompts of growing length

    RECIPE gives everything except the attention, the text and the length; of attention alone, the heads and their
    width. One row is measured, and the attentions take turns; softmax alone is torch's own. Native code or a CUDA graph
    generates where it can. What would take more than five minutes a pass is left out.

    \b
    Example: where softmax falls behind.
      lmlong bench attention --lengths 1k,4k,16k,64k
      lmlong bench train quickstart --lengths 2k,8k,32k --only softmax,elu-learned
      lmlong bench generate quickstart --lengths 128,8k --only softmax,elu-learned
    """
    from lmlong.recipe.lengths import parse_lengths

    chosen, usual = load_recipe(recipe, overrides), BENCHMARKS[what]
    names = (*ATTENTIONS, *plugin_candidates()) if only is None else _named(only)
    formats = usual.precisions if precisions is None else parse_names("--precisions", precisions, usual.formats)

    from lmlong.bench.speed import run_benchmark, speed_report
    from lmlong.model.device import pick_device

    picked = pick_device(device)
    title, build = _benchmark(what, chosen, picked)
    results = run_benchmark(build, names, formats, lengths or parse_lengths(usual.lengths), picked)
    show(speed_report(title, {"recipe": recipe}, results), json_file, plot)


def _named(only: str) -> tuple[str, ...]:
    """Return the attentions of --only. A kind that has several forms is refused with their names."""
    known = candidates()
    for word in set(only.split(",")) - known.keys():
        if forms := [name for name, options in known.items() if options["kind"] == word]:
            raise UsageError(f"--only: {word} has several forms. Choose from {', '.join(forms)}.")
    return parse_names("--only", only, known)


def _benchmark(what: str, chosen: "Recipe", device: "torch.device") -> tuple["Title", "Build"]:
    """Return the description of a benchmark, and what makes its candidates."""
    from lmlong.bench import candidates as bench
    from lmlong.bench.speed import Title
    from lmlong.model.device import describe_machine

    machine, model = describe_machine(device), chosen.model
    if what == "attention":
        heads, width = model.heads, model.head_dims.key
        work = f"attention alone, forward and backward, {heads} heads of width {width}"
        memory = "peak memory, as a multiple of inputs, outputs and gradients"
        build = partial(bench.attention_candidate, heads=heads, width=width, device=device)
        return Title(work, machine, memory, lambda one: one.peak / one.least), build
    size = f"{model.layers} layers of width {model.width}, vocabulary {chosen.text.tokenizer.most_tokens:,}"
    if what == "train":
        title = Title(f"a training step of {size}", machine, "MB held beside weights and moments", _megabytes)
        return title, partial(bench.training_candidate, options=chosen, device=device)
    title = Title(f"generation with {size}", machine, "MB of state", _megabytes)
    return title, bench.GenerationCandidates(chosen, device, compiled=True).candidate


def _megabytes(result: "Result") -> float:
    return result.peak / 1e6
