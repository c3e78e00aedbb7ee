"""`lmlong convert`: convert a trained model to another attention."""

from pathlib import Path

import click

from lmlong.cli import options
from lmlong.cli.options import load_recipe
from lmlong.cli.output import show_facts


@click.command()
@options.run
@options.overrides
@click.option("--to", "recipe", required=True, metavar="RECIPE", help="Recipe of the converted model.")
@options.run_out
@click.option("--resume", is_flag=True, help="Resume a stopped conversion.")
@click.option("--overwrite", is_flag=True, help="Replace run folders that exist.")
@click.option("--dry-run", is_flag=True, help="Take a few steps of each stage, and report its time and memory.")
@options.json_file
@options.plugin
def convert(
    run: str,
    overrides: tuple[str, ...],
    recipe: str,
    out: Path | None,
    resume: bool,
    overwrite: bool,
    dry_run: bool,
    json_file: Path | None,
) -> None:
    """Replace the attention of the model of RUN by that of RECIPE, and train it to match the original.

    All other weights are copied. Training has three stages: each layer matches the output of the original layer, the
    model matches its predictions, and then it trains on the text. They are the runs OUT-layers, OUT-predictions and
    OUT, with the budgets that RECIPE sets. Options of `model` that RECIPE leaves out, and the tokenizer, are as in RUN.

    \b
    lmlong convert runs/softmax --to mine.yaml
    lmlong convert runs/softmax --to mine.yaml --resume
    """
    if resume and "auto" in overrides:
        raise click.UsageError("--resume of convert takes no value. Leave out auto.")
    chosen = load_recipe(recipe, [*overrides, f"training.init_from={run}"])
    if resume and overwrite:
        raise click.UsageError("--resume and --overwrite are mutually exclusive. Leave out one of them.")
    from lmlong.report.json_values import json_values
    from lmlong.training import conversion, conversion_report, run_folder

    folder = out or run_folder.default_folder(chosen)
    planned = conversion.stages(chosen, run, folder)
    conversion.check(chosen, run)
    if not (resume or overwrite or dry_run):
        conversion.check_folders(planned)
    length = planned[0].recipe.text.sequence_length
    run_folder.check_sources(planned[0].recipe)
    conversion.check_text(run, planned)
    if dry_run:
        measured = dict(conversion.dry_runs(planned))
        show_facts("\n\n".join(f"{name}\n{stage.text()}" for name, stage in measured.items()), measured, json_file)
        return
    if status := conversion.train_stages(planned, overwrite):
        if status > 128:
            click.echo("stopped; run the same command with --resume to continue", err=True)
        raise SystemExit(status)
    points = conversion_report.measure(run, planned)
    show_facts(conversion_report.table(points, length), json_values(points), json_file)
