"""`lmlong recipe`: list, show, check and copy recipes, and explain their options."""

import json
import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lmlong.cli import options as common
from lmlong.cli.options import load_recipe
from lmlong.cli.output import show_facts
from lmlong.errors import UsageError, nearest

if TYPE_CHECKING:
    from lmlong.recipe import Recipe
    from lmlong.recipe.reference import Option

WIDTH = 80


@click.group()
def recipe() -> None:
    """List, show, check and copy recipes; explain their options.

    \b
    Example: start a recipe of your own from one that works.
      lmlong recipe copy quickstart books.yaml
      lmlong recipe check books.yaml
    """


@recipe.command("list")
def list_recipes() -> None:
    """List the recipes that come with lmlong and how to run them.

    \b
    Example:
      lmlong recipe list
    """
    from lmlong.recipe.find import shipped_recipes

    for name, file in shipped_recipes().items():
        command, *description = _leading_comments(file.read_text(encoding="utf-8"))
        click.echo(f"{name}\n{_paragraph(' '.join(description))}\n    $ {command}")


@recipe.command()
@common.recipe("name")
@click.option("--resolved", is_flag=True, help="Print every key, defaults included, and check the recipe.")
def show(name: str, resolved: bool) -> None:
    """Print the recipe NAME (or a file) as it was written.

    \b
    Example: every option the quickstart runs with.
      lmlong recipe show quickstart --resolved
    """
    from lmlong.recipe.file import dump
    from lmlong.recipe.find import find_recipe, read_recipe_file

    click.echo(dump(load_recipe(name)) if resolved else read_recipe_file(find_recipe(name)), nl=False)


@recipe.command()
@common.recipe("file")
@common.overrides
def check(file: str, overrides: tuple[str, ...]) -> None:
    """Check a recipe and report all mistakes. FILE may also be the name of a shipped recipe, and options may be
    replaced. Files, runs and packages that are not on this machine are named, and are no mistake.

    \b
    Example: would this run with shorter sequences?
      lmlong recipe check quickstart text.sequence_length=512
    """
    checked = load_recipe(file, overrides)
    click.echo(f"ok: {_summary(checked)}")
    if missing := _missing_files(checked):
        click.echo(f"not on this machine: {', '.join(missing)}", err=True)
    if checked.training.strategy == "deepspeed":
        from lmlong.training.deepspeed_config import check_deepspeed

        try:
            check_deepspeed(checked.training)
        except UsageError as error:
            click.echo(error, err=True)


@recipe.command()
@common.recipe("name")
@click.argument("destination", type=click.Path(path_type=Path))
def copy(name: str, destination: Path) -> None:
    """Copy the recipe NAME to a file or folder. DESTINATION is not overwritten.

    \b
    Example:
      lmlong recipe copy quickstart books.yaml
    """
    from lmlong.recipe.find import find_recipe, read_recipe_file

    source = find_recipe(name)
    target = destination / source.name if destination.is_dir() else destination
    try:
        with target.open("x", encoding="utf-8", newline="") as file:
            file.write(read_recipe_file(source))
    except FileExistsError:
        raise UsageError(f"{target}: exists already. Use another name, or remove it first.") from None
    except OSError as error:
        raise UsageError(f"{target}: cannot be written: {error.strerror}.") from None
    click.echo(target)


@recipe.command()
@click.argument("words", metavar="[WORD]...", nargs=-1)
@common.json_file
def options(words: tuple[str, ...], json_file: Path | None) -> None:
    """Explain the options of a recipe: type, default, meaning. With WORDs, list the options whose key or explanation
    contains all of them; the key of a section selects the options in it.

    \b
    Example: the options of training, and those about decay.
      lmlong recipe options training
      lmlong recipe options decay
    """
    from lmlong.recipe.file import recipe_class
    from lmlong.recipe.reference import reference

    everything = reference(recipe_class())
    sections = [word for word in words if any(row.key.startswith(f"{word}.") for row in everything)]
    rows = [row for row in everything if _has(row, [word for word in words if word not in sections], sections)]
    if not rows:
        hint = nearest(words[0], {part for row in everything for part in (row.key, *row.key.split("."))})
        raise UsageError(f"{' '.join(words)}: no option matches.{hint} `lmlong recipe options` lists all.")
    show_facts("\n\n".join(map(_explanation, rows)), [row._asdict() for row in rows], json_file)


def _leading_comments(text: str) -> list[str]:
    """Return the lines of the comment at the head of a recipe: the command that runs it, then a description."""
    lines = text.splitlines()
    end = next((number for number, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return [line.removeprefix("#").strip() for line in lines[:end]]


def _summary(recipe: "Recipe") -> str:
    """Return the model that a recipe trains, on one line."""
    model, text, training = recipe.model, recipe.text, recipe.training
    kinds = model.attention.kind
    attention = kinds if isinstance(kinds, str) else ", ".join(kinds)
    attention += f" attention and n-gram heads in {len(model.add_ngram)}" if model.add_ngram else " attention"
    attention += model.beside_windows
    shorter = (
        f" ({len(model.downsampled_layers)} of them on blocks of {model.factor} tokens)" if model.downsample else ""
    )
    limits = [f"{training.steps} steps"] if training.steps else []
    limits += [f"{training.tokens} tokens"] if training.tokens else []
    limits += [f"{training.epochs:g} epochs"] if training.epochs else []
    limits += [training.time_limit] if training.minutes else []
    return (
        f"{recipe.name}: {model.layers} layers of width {model.width}{shorter}, {attention}, "
        f"sequences of {text.sequence_length} tokens, {' or '.join(limits)}"
    )


def _missing_files(recipe: "Recipe") -> list[str]:
    """Return the files and runs that do not exist here."""
    from glob import has_magic

    from lmlong.checkpoint.location import folder_of
    from lmlong.recipe import Files
    from lmlong.recipe.paths import is_on_hub

    sources = (*recipe.text.sources, *recipe.text.validation.sources)
    paths = [path for source in sources if isinstance(source, Files) for path in source.paths]
    paths += [recipe.text.tokenizer.path] if recipe.text.tokenizer.path else []
    local = (path for path in paths if not (path.startswith("-") or is_on_hub(path) or has_magic(path)))
    runs = [run for run in (recipe.training.init_from, recipe.training.teacher) if run]
    missing_runs = [run for run in runs if not folder_of(run).exists()]
    return [path for path in local if not Path(path).expanduser().exists()] + missing_runs


def _has(option: "Option", words: list[str], sections: list[str]) -> bool:
    """Return whether an option is in these sections, and each word begins one of its key, synonyms, type or meaning."""
    from lmlong.recipe.mistakes import SYNONYMS

    synonyms = SYNONYMS.get(option.key.rpartition(".")[2], ())
    text = " ".join((option.key, *synonyms, option.kind or "", option.type, option.meaning)).lower()
    inside = all(f"{option.key}.".startswith(f"{section}.") for section in sections)
    return inside and all(re.search(rf"(?<![a-z]){re.escape(word.lower())}", text) for word in words)


def _explanation(option: "Option") -> str:
    """Format one option as a paragraph under its key."""
    of_kind = f"  (kind: {option.kind})" if option.kind else ""
    value = option.type
    if option.required:
        value += "; required"
    elif not isinstance(option.default, dict):
        value += f"; default {json.dumps(option.default)}"
    return f"{option.key}{of_kind}\n{_paragraph(value)}\n{_paragraph(option.meaning)}"


def _paragraph(text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)
