"""`lmlong data`: make the token files of a recipe's text, and count what was read."""

import json
import textwrap
from typing import TYPE_CHECKING, Any

import click

from lmlong.cli import options
from lmlong.cli.plugins import load_recipe

if TYPE_CHECKING:
    from lmlong.data.token_dataset import TokenDataset
    from lmlong.recipe import Text

SPLITS = ("train", "validation")


@click.group()
def data() -> None:
    """Make token files ahead of training, and count what is in them.

    \b
    Example: what will the quickstart train on?
      lmlong data info quickstart
    """


@data.command()
@options.recipe(default="quickstart")
@options.overrides
@click.option(
    "--processes",
    type=click.IntRange(1, 1024),
    help="Processes that tokenize; the files are the same for any number.  [default: one for each core]",
)
def prepare(recipe: str, overrides: tuple[str, ...], processes: int | None) -> None:
    """Make the token files of RECIPE (a file or a shipped name) unless they are there, and print their folder. What was
    cut off goes on.

    \b
    Example: tokenize your own books before the first training.
      lmlong data prepare books.yaml
    """
    from lmlong.data.notes import text_notes

    found = _prepare(recipe, overrides, processes)
    for line in text_notes(found.info):
        click.echo(line, err=True)
    click.echo(found.folder)


@data.command()
@options.recipe(default="quickstart")
@options.overrides
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def info(recipe: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Count the documents, bytes and tokens of RECIPE's text, and tell what was skipped.

    \b
    Example: how many bytes make a token with 8,192 pieces?
      lmlong data info quickstart text.tokenizer.vocabulary=8192
    """
    from lmlong.data.overlap import overlap_note

    found = _prepare(recipe, overrides)
    if as_json:
        click.echo(json.dumps({"folder": str(found.folder), **found.info}, indent=2))
    else:
        overlap = _wrapped(overlap_note(found.info["overlap"])).strip()
        click.echo("\n\n".join([*map(_table, found.info["sources"]), overlap, f"{found.folder}"]))


@data.command()
@click.argument("places", nargs=-1, required=True, metavar="RECIPE|PATH...")
@click.option("--documents", default=10, show_default=True, type=click.IntRange(1), help="Show so many.")
@click.option("--characters", default=1000, show_default=True, type=click.IntRange(0), help="Of each, so many.")
@click.option("--all", "everything", is_flag=True, help="All of all documents.")
@click.option("--column", default="text", show_default=True, help="PATH: the field of records that holds the text.")
@click.option("--json", "as_json", is_flag=True, help="A line of JSON for each document.")
def show(
    places: tuple[str, ...], documents: int, characters: int, everything: bool, column: str, as_json: bool
) -> None:
    """Print what documents became: those of a RECIPE's sources, or of files, folders and globs, or of - for standard
    input.

    Only their text goes to standard output; their names and sizes, and what was skipped, to standard error.

    \b
    Example: a book as text, and the beginnings of what a folder holds.
      lmlong data show book.epub --all > book.txt
      lmlong data show papers --documents 3
      curl -s https://example.org | lmlong data show -- -.html
    """
    from lmlong.cli.showing import show_documents

    text = _text_of(places, column)
    show_documents(text, None if everything else documents, None if everything else characters, as_json)


def _text_of(places: tuple[str, ...], column: str) -> "Text":
    """Return the text of a recipe, or of files by their names, or of standard input."""
    from lmlong.io.standard_input import path_of
    from lmlong.recipe import Files, Text
    from lmlong.recipe.parsed import shipped_recipes

    if len(places) == 1 and (places[0] in shipped_recipes() or places[0].endswith((".yaml", ".yml"))):
        return load_recipe(places[0], ()).text
    return Text(sources=[Files(kind="files", paths=list(map(path_of, places)), column=column)])


def counted(number: int, thing: str) -> str:
    """Return a number of things in words."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def _prepare(recipe: str, overrides: tuple[str, ...], processes: int | None = None) -> "TokenDataset":
    from lmlong.data import token_dataset as tokens
    from lmlong.data.sources import check_quickly

    text = load_recipe(recipe, overrides).text
    check_quickly(text)
    return tokens.prepare(text, processes=processes)


def _table(source: dict[str, Any]) -> str:
    """Return the counts of one source: documents read and skipped, and a line for each split."""
    from lmlong.data.notes import named, notes

    read, near = source["read"], source["near_copies"]
    columns = ("documents", "bytes", "tokens", "bytes/token")
    replaced = f"{read['replaced_bytes']:,} bytes that could not be decoded by {read['put_in_bytes']:,} of U+FFFD"
    told = [
        *(
            f"skipped {counted(count['documents'], 'document')}, {count['bytes']:,} bytes ({reason}): {named(count)}"
            for reason, count in source["skipped"].items()
        ),
        *notes(source),
        *([f"replaced {replaced}"] if read["replaced_bytes"] else []),
        *([f"trained on, not held out, as near-copies of training text: {named(near)}"] if near["documents"] else []),
    ]
    lines = [
        source["name"],
        f"  read {counted(read['documents'], 'document')}, {read['bytes']:,} bytes",
        *map(_wrapped, told),
        f"  {'':<10}" + "".join(f"{column:>13}" for column in columns),
    ]
    for split in SPLITS:
        if count := source.get(split):
            text_tokens = count["tokens"] - 2 * count["documents"]  # bos and eos stand for no text
            ratio = f"{count['bytes'] / text_tokens:.2f}" if text_tokens else "-"
            numbers = (count["documents"], count["bytes"], count["tokens"], ratio)
            cells = (number if isinstance(number, str) else f"{number:,}" for number in numbers)
            lines.append(f"  {split:<10}" + "".join(f"{cell:>13}" for cell in cells))
    return "\n".join(lines)


def _wrapped(line: str) -> str:
    """Return a line of at most 80 columns, or several, but for a name that is longer."""
    return textwrap.fill(
        line, 80, initial_indent="  ", subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )
