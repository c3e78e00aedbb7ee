"""`lmlong train`: train a model by a recipe."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from lmlong.cli import options
from lmlong.cli.plugins import load_recipe

if TYPE_CHECKING:
    from lmlong.training.run import TrainingResult


@click.command()
@options.recipe(metavar="RECIPE")
@options.overrides
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Run folder.  [default: runs/NAME]")
@click.option("--resume", metavar="auto|PATH", help="Go on from the newest checkpoint of the run, or from this one.")
@click.option("--overwrite", is_flag=True, help="Replace a run folder that exists.")
@click.option("--device", type=options.DEVICES, help="Where to run; short for device=...")
@options.threads
@click.option("--dry-run", is_flag=True, help="Take a few short steps and tell what the run would take.")
@click.option("--memory", metavar="24GB", help="With --dry-run: memory of a device; tells what batch and segment fit.")
def train(
    recipe: str,
    overrides: tuple[str, ...],
    out: Path | None,
    resume: str | None,
    overwrite: bool,
    device: str | None,
    dry_run: bool,
    memory: str | None,
) -> None:
    """Train a model by RECIPE, a file or the name of a shipped recipe.

    \b
    lmlong train quickstart
    lmlong train quickstart training.steps=100 --out /tmp/short
    lmlong train quickstart --resume auto
    lmlong train medium --dry-run --memory 24GB
    """
    chosen = load_recipe(recipe, [*overrides, *([f"device={device}"] if device else [])])
    if memory and not dry_run:
        raise click.UsageError("--memory plans a run and needs --dry-run.")
    from lmlong.training import run_folder

    folder = out or run_folder.default_folder(chosen)
    if not dry_run and not run_folder.is_locked(folder):
        run_folder.check_folder(folder, chosen, resume, overwrite)
    run_folder.check_sources(chosen, resume)
    if dry_run:
        from lmlong.training.plan import make_plan, parse_memory

        click.echo(make_plan(chosen, parse_memory(memory) if memory else None).text())
        return

    from lmlong.cli.report import after_training, next_commands
    from lmlong.training.run import run

    result = run(chosen, folder, resume, overwrite)
    if result.is_main_process:
        click.echo(after_training(result, _sample(result), next_commands(result.run, chosen)))
    if result.signal is not None:
        raise SystemExit(128 + result.signal)


def _sample(result: "TrainingResult") -> str:
    """Return a short text of a causal model that was trained to its end."""
    if result.validation is None or result.baselines is None:
        return ""
    from lmlong.inference.first_sample import first_sample

    return first_sample(result.run)
