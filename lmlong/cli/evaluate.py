"""lmlong eval: perplexity against length."""

import json
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

from lmlong.cli import options
from lmlong.errors import UsageError, nearest

if TYPE_CHECKING:
    from lmlong.evaluation.report import Report


STDOUT = Path("-")
USUAL_VIEWS = "context,position,state"
Name = TypeVar("Name", bound=str)
Found = TypeVar("Found")
Result = click.Path(dir_okay=False, writable=True, allow_dash=True, path_type=Path)


@click.command("eval")
@click.argument("runs", metavar="RUN...", nargs=-1, required=True)
@click.option("--data", multiple=True, metavar="FILE", help="Measure on this file, folder or glob; may be repeated.")
@click.option(
    "--lengths",
    metavar="N,...",
    help="Contexts to compare; k is 1,024.  [default: 256,512,1k ... 16k and the trained]",
)
@click.option(
    "--by",
    "views",
    metavar="VIEW,...",
    default=USUAL_VIEWS,
    show_default=True,
    help="What to measure, of context, position, protocol and state.",
)
@click.option(
    "--targets",
    default=8192,
    show_default=True,
    type=click.IntRange(1),
    help="About how many tokens are scored at each context.",
)
@click.option(
    "--min-documents",
    default=10,
    show_default=True,
    type=click.IntRange(1),
    help="Leave out lengths that fewer documents reach.",
)
@click.option(
    "--probe",
    "probes",
    metavar="NAME,...",
    help="Ask for what was said --lengths tokens before instead: copy, induction, mqar, passkey, needle, or all.",
)
@click.option(
    "--spectrum",
    is_flag=True,
    help="Measure the singular values of attention at each length instead.  [default length: 512]",
)
@click.option(
    "--trials",
    type=click.IntRange(1),
    help="--probe, --spectrum: texts at each length.  [default: 64; 8 for --spectrum]",
)
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="--probe: the texts follow from it.")
@click.option("--tokens", type=click.IntRange(min=2), help="Read only so many tokens of the text.")
@click.option("--json", "json_file", type=Result, help="Write the results as JSON; - for standard output, alone.")
@click.option("--plot", type=Result, help="Draw bits per byte: .png, .pdf or .svg.")
@options.weights
@options.sums
@options.device
def eval_(
    runs: tuple[str, ...],
    data: tuple[str, ...],
    lengths: str | None,
    views: str,
    targets: int,
    min_documents: int,
    probes: str | None,
    spectrum: bool,
    trials: int | None,
    seed: int,
    tokens: int | None,
    json_file: Path | None,
    plot: Path | None,
    weights: Literal["32", "bf16", "int8"],
    sums: Literal["32", "64"],
    device: str,
) -> None:
    """Measure how well each RUN predicts text, and what text further back is worth to it.

    
    context   the same tokens at each length, with so many tokens before them
    position  each document read once, by how many tokens are before
    protocol  the state emptied at each window, overlapping windows, or carried
    state     norm of S, features in use, smallest denominator while it reads

    The text is what the run held out of its training, unless --data names another. Standard errors are over documents;
    a change between lengths has the error of the differences on the same tokens. Compare runs with different tokenizers
    by bits per byte. An encoder is measured by the perplexity of hidden tokens instead.

    
    Example: one run on its own held-out text, then two on the same books.
      lmlong eval runs/quickstart --lengths 256,512,1k,2k
      lmlong eval linear softmax --data 'books/*.txt' --plot length.png
      lmlong eval linear softmax --probe induction,mqar --lengths 64,256,1k
      lmlong eval softmax --spectrum --lengths 128,512 --plot spectrum.png
    """
    from lmlong.charts import check_format
    from lmlong.evaluation.perplexity import VIEWS, Question, measure, validation_text
    from lmlong.inference.loading import load
    from lmlong.lengths import parse_lengths

    wanted = tuple(parse_lengths(lengths)) if lengths is not None else None
    question = Question(_chosen("--by", views, VIEWS), wanted, targets, min_documents)
    if spectrum and (probes is not None or weights != "32" or sums != "32"):
        raise UsageError(
            "--spectrum: is measured alone, of weights as they were trained. Leave out --probe, --weights, --sums."
        )
    for file in (json_file, plot):
        _check_folder(file)
    if plot:
        check_format(plot)
        if question.views == ("state",):
            raise UsageError("--plot: draws context, position and protocol. Name one of them in --by.")

    if spectrum:
        from lmlong.evaluation import spectrum_report as shares
        from lmlong.evaluation.spectrum import LENGTHS, TEXTS, spectra
        from lmlong.inference.loading import open_run

        whole = ((_name(run), model := open_run(run, device), validation_text(model, data, tokens)) for run in runs)
        values = [each for run in whole for each in spectra(*run, wanted or LENGTHS, trials or TEXTS)]
        _show(values, shares.table, shares.plain, shares.draw, json_file, plot)
        return

    narrower = {"--lengths": lengths, "--probe": probes, "--plot": plot, "--by": views != USUAL_VIEWS}
    narrower |= {"--weights": weights != "32", "--sums": sums != "32"}
    if _of_encoders(runs, {option: bool(value) for option, value in narrower.items()}):
        from lmlong.evaluation import masked
        from lmlong.inference.loading import open_run

        opened = ((_name(run), model := open_run(run, device), validation_text(model, data, tokens)) for run in runs)
        _show([masked.measure(*each) for each in opened], masked.table, masked.plain, None, json_file, None)
        return
    loaded = (
        (_name(run), model := load(run, device, weights, sums), validation_text(model, data, tokens)) for run in runs
    )
    if probes is None:
        from lmlong.evaluation.plain import plain
        from lmlong.evaluation.plots import draw
        from lmlong.evaluation.tables import table

        found = []
        for name, model, text in loaded:
            found.append(measure(name, model, text, question))
            _note(found[-1], min_documents)
        _show(found, table, plain, draw, json_file, plot)
    else:
        from lmlong.evaluation import recall_report as report
        from lmlong.evaluation.probes import PROBES
        from lmlong.evaluation.recall import DISTANCES, TRIALS, recall

        names = _chosen("--probe", probes, PROBES) if probes != "all" else tuple(PROBES)
        answers = [recall(*each, names, wanted or DISTANCES, trials or TRIALS, seed) for each in loaded]
        _show(answers, report.table, report.plain, report.draw, json_file, plot)


def _of_encoders(runs: tuple[str, ...], given: dict[str, bool]) -> bool:
    """Whether the runs are encoders' and can be measured as such; refused where an option needs a language model."""
    from lmlong.checkpoint.read import read_recipe, reading

    encoders = [run for run in runs if reading(run, read_recipe).objective == "masked"]
    if encoders and len(encoders) < len(runs):
        raise UsageError(
            f"{encoders[0]}: an encoder (objective: masked) is measured by hidden tokens alone. Name "
            "runs of one objective."
        )
    for option in (option for option, is_given in given.items() if encoders and is_given):
        raise UsageError(
            f"{option}: {encoders[0]} is an encoder (objective: masked) that reads its text at once, on both sides of "
            "each token; it has no past to measure by and no state. Leave the option out, or name a language model."
        )
    return bool(encoders)


def _show(
    found: Found,
    table: Callable[[Found], str],
    plain: Callable[[Found], dict[str, Any]],
    draw: Callable[[Found, Path], None] | None,
    json_file: Path | None,
    plot: Path | None,
) -> None:
    """What was found, in every form that was asked for."""
    if plot and draw:
        draw(found, plot)
    if json_file != STDOUT:
        click.echo(table(found))
    if json_file:
        with click.open_file(str(json_file), "w", encoding="utf-8") as out:
            out.write(json.dumps(plain(found), indent=2, allow_nan=False) + "\n")


def _chosen(option: str, text: str, known: Collection[Name]) -> tuple[Name, ...]:
    """The names in a list like context,state, in the order in which they are known."""
    for word in (words := text.split(",")):
        if word not in known:
            raise UsageError(f"{option}: there is no '{word}'.{nearest(word, known)}")
    return tuple(name for name in known if name in words)


def _name(run: str) -> str:
    """What a run is called in tables and plots: its path without what all have in common."""
    return run.rstrip("/").removeprefix("runs/")


def _check_folder(file: Path | None) -> None:
    """Refuse a place where no file can be written, before hours are spent on what it should hold."""
    if file and not os.access(file.parent, os.W_OK):
        raise UsageError(f"{file}: its folder is missing or cannot be written to. Create it, or name another file.")


def _note(report: "Report", wanted: int) -> None:
    """Tell on stderr what was not measured."""
    from lmlong.lengths import name_length

    if report.left_out:
        names = ", ".join(map(name_length, report.left_out))
        click.echo(f"{report.name}: fewer than {wanted} documents reach {names}: left out", err=True)
