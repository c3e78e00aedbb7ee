"""`lmlong spectrum`: measure the singular values of attention."""

from pathlib import Path

import click

from lmlong.cli import options
from lmlong.cli.lists import lengths
from lmlong.cli.output import show
from lmlong.cli.runs import load_runs


@click.command()
@options.runs
@lengths("Tokens of a text; k is 1,024.", "512")
@click.option("--texts", default=8, type=click.IntRange(1), help="Texts at each length.")
@options.data
@options.tokens
@options.json_file
@options.plot("the spectra")
@options.threads
@options.device
def spectrum(
    runs: tuple[str, ...],
    lengths: list[int],
    texts: int,
    data: tuple[str, ...],
    tokens: int | None,
    json_file: Path | None,
    plot: Path | None,
    device: str,
) -> None:
    """Measure the singular values of each RUN's attention matrices, by layer and head.

    If a few of them hold most of the sum, keys and values can be shortened to a few slots, as Linformer does.

    \b
    Example: two lengths of one run.
      lmlong spectrum softmax --lengths 128,512 --plot spectrum.png
    """
    from lmlong.evaluation.spectrum import measure_spectra
    from lmlong.evaluation.spectrum_report import figure, table, to_json
    from lmlong.inference.loading import open_run

    loaded = load_runs(runs, lambda run: open_run(run, device), data, tokens)
    spectra = [spectrum for run in loaded for spectrum in measure_spectra(*run, lengths, texts)]
    show(table(spectra), to_json(spectra), json_file, plot, figure(spectra) if plot else None)
