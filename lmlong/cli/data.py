"""`lmlong data`: tokenize the text of a recipe, inspect it, and train tokenizers."""

import json
import math
import sys
import textwrap
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lmlong.cli import options
from lmlong.cli.options import load_recipe
from lmlong.cli.output import show_facts
from lmlong.report.table import Column, plural

if TYPE_CHECKING:
    from lmlong.data.document import Document
    from lmlong.data.token_dataset import TokenDataset
    from lmlong.recipe import Text

SPLITS = ("train", "validation")
COLUMNS = [
    Column("", 12, align="<"),
    *(Column(name, 13, ",") for name in ("documents", "bytes", "tokens")),
    Column("bytes/token", 13, ".2f"),
]
DOCUMENTS, CHARACTERS = 10, 1000
"""Documents of each source, and characters of each, that are shown without --all."""


@click.group()
def data() -> None:
    """Tokenize and inspect text; train tokenizers.

    \b
    Example: the training text of quickstart.
      lmlong data info quickstart
    """


@data.command()
@options.recipe(default="quickstart")
@options.overrides
@click.option(
    "--processes",
    type=click.IntRange(1, 1024),
    help="Number of tokenizer processes, which does not affect the files.  [default: one per core]",
)
def prepare(recipe: str, overrides: tuple[str, ...], processes: int | None) -> None:
    """Tokenize the text of RECIPE, a file or a shipped name. Print the folder of the token files. Existing files are
    reused, and interrupted work continues.

    \b
    Example: tokenize your own books before training.
      lmlong data prepare books.yaml
    """
    from lmlong.data.text_info import text_notes

    tokens = _prepare(recipe, overrides, processes)
    for line in text_notes(tokens.info):
        click.echo(line, err=True)
    click.echo(tokens.folder)


@data.command()
@options.recipe(default="quickstart")
@options.overrides
@options.json_file
def info(recipe: str, overrides: tuple[str, ...], json_file: Path | None) -> None:
    """Count the documents, bytes and tokens of a text. Print the counts of the text of RECIPE, and what was skipped.

    \b
    Example: the bytes per token of a vocabulary of 8,192.
      lmlong data info quickstart text.tokenizer.vocabulary=8192
    """
    from lmlong.data.text_info import overlap_note

    tokens = _prepare(recipe, overrides)
    overlap = _wrapped(overlap_note(tokens.info["overlap"])).strip()
    text = "\n\n".join([*map(_table, tokens.info["sources"]), overlap, f"{tokens.folder}"])
    show_facts(text, {"folder": str(tokens.folder), **tokens.info}, json_file)


@data.command()
@click.argument("inputs", nargs=-1, required=True, metavar="RECIPE|PATH...")
@click.option("--all", "everything", is_flag=True, help="Print all documents completely, not only their beginnings.")
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON for each document.")
def show(inputs: tuple[str, ...], everything: bool, as_json: bool) -> None:
    """Print the text of documents as training reads it. The documents are those of the sources of RECIPE, of files,
    folders and globs, also on the Hugging Face Hub (hf://datasets/...), or of - for standard input. Without --all, the
    first 1,000 characters of the first ten documents of each source are printed.

    Only text goes to standard output; names, sizes and skipped files go to standard error.

    \b
    Example: a book as text, and the first documents of a folder.
      lmlong data show book.epub --all > book.txt
      lmlong data show papers
      curl -s https://example.org | lmlong data show -- -.html
    """
    _show_documents(_text_of(inputs), everything, as_json)


@data.command()
@options.recipe(default="quickstart")
@options.overrides
@click.option("--out", required=True, type=click.Path(dir_okay=False, path_type=Path), help="The file to write.")
def train_tokenizer(recipe: str, overrides: tuple[str, ...], out: Path) -> None:
    """Train a tokenizer and write it to a file. Its text and its options are those of RECIPE, a file or a shipped name.

    \b
    Example: a tokenizer for your own books.
      lmlong data train-tokenizer books.yaml --out books.model
    """
    from lmlong.data.sources import check_quickly, open_sources
    from lmlong.data.tokenizers.training import tokenizer_of

    text = load_recipe(recipe, overrides).text
    check_quickly(text)
    tokenizer_of(open_sources(text), text.tokenizer, text.duplicates).save(out)
    click.echo(out)


@data.command()
@click.argument("path", metavar="FILE_OR_RUN", type=click.Path(exists=True, path_type=Path))
@click.option("--text", help="A text to tokenize.")
@options.json_file
def tokenizer_info(path: Path, text: str | None, json_file: Path | None) -> None:
    """Describe a tokenizer and print the tokens of a text. The tokenizer is in a file or in the folder of a run.

    \b
    Example: the tokens of a line.
      lmlong data tokenizer-info runs/quickstart --text "for line in lines:"
    """
    from lmlong.data.tokenizers import load_tokenizer

    loaded = load_tokenizer(path / "tokenizer.model" if path.is_dir() else path)
    facts = {"vocabulary": loaded.vocabulary, "bos": loaded.bos, "eos": loaded.eos, "hash": loaded.hash}
    if text is not None:
        tokens = loaded.encode(text)
        size = int(loaded.token_bytes[tokens].sum())
        facts |= {"tokens": tokens, "pieces": [loaded.decode([token]) for token in tokens], "bytes": size}
    show_facts("\n".join(f"{name:<10}  {value}" for name, value in facts.items()), facts, json_file)


def _text_of(inputs: tuple[str, ...]) -> "Text":
    """Return the text section of a recipe, or of one made of files or standard input."""
    from lmlong.io.standard_input import path_of
    from lmlong.recipe import Files, Text
    from lmlong.recipe.find import shipped_recipes

    if len(inputs) == 1 and (inputs[0] in shipped_recipes() or inputs[0].endswith((".yaml", ".yml"))):
        return load_recipe(inputs[0], ()).text
    return Text(sources=[Files(kind="files", paths=list(map(path_of, inputs)))])


def _show_documents(text: "Text", everything: bool, as_json: bool) -> None:
    """Print all documents of each source, or the beginnings of the first ones."""
    from lmlong.data.document import Skipped
    from lmlong.data.sources import open_sources

    for source in open_sources(text):
        shown = 0
        for skipped in source.left_out:
            click.echo(f"left out {skipped.name}: {skipped.reason}", err=True)
        for document in source.documents():
            if isinstance(document, Skipped):
                click.echo(f"skipped {document.name}: {document.reason}", err=True)
                continue
            if shown == DOCUMENTS and not everything:
                click.echo("more documents follow: use --all", err=True)
                break
            shown += 1
            _show_document(document, source.name, None if everything else CHARACTERS, as_json)


def _show_document(document: "Document", source: str, characters: int | None, as_json: bool) -> None:
    size = document.measure().bytes
    if as_json:
        text = "".join(islice((character for piece in document.pieces() for character in piece), characters))
        about = {"source": source, "document": document.name, "bytes": size, **document.fields}
        click.echo(json.dumps({**about, "text": text}, default=str))
        return
    click.echo(f"--- {document.name}: {size:,} bytes", err=True)
    left, last = size if characters is None else characters, ""
    for piece in document.pieces():
        piece = piece[:left]
        sys.stdout.write(piece)
        last, left = piece[-1:], left - len(piece)
        if not left:
            break
    sys.stdout.write("" if last == "\n" else "\n")
    sys.stdout.flush()


def _prepare(recipe: str, overrides: tuple[str, ...], processes: int | None = None) -> "TokenDataset":
    from lmlong.data import token_dataset as tokens
    from lmlong.data.sources import check_quickly

    text = load_recipe(recipe, overrides).text
    check_quickly(text)
    return tokens.prepare(text, processes=processes)


def _table(source: dict[str, Any]) -> str:
    """Return the counts of one source: documents read and skipped, and a line for each split."""
    from lmlong.data.text_info import named, notes
    from lmlong.report.report import Table

    read, near = source["read"], source["near_copies"]
    replaced = f"{read['replaced_bytes']:,} bytes that could not be decoded by {read['put_in_bytes']:,} of U+FFFD"
    notes_of_source = [
        *(
            f"skipped {plural(count['documents'], 'document')}, {count['bytes']:,} bytes ({reason}): {named(count)}"
            for reason, count in source["skipped"].items()
        ),
        *notes(source),
        *([f"replaced {replaced}"] if read["replaced_bytes"] else []),
        *([f"near-copies of training text, which are not held out: {named(near)}"] if near["documents"] else []),
    ]
    facts = [
        f"  read {plural(read['documents'], 'document')}, {read['bytes']:,} bytes",
        *map(_wrapped, notes_of_source),
    ]
    rows = [_row(split, source[split]) for split in SPLITS if source.get(split)]
    return str(Table("\n".join([source["name"], *facts]), COLUMNS, rows))


def _row(split: str, count: dict[str, int]) -> list[Any]:
    text_tokens = count["tokens"] - 2 * count["documents"]  # bos and eos stand for no text
    ratio = count["bytes"] / text_tokens if text_tokens else math.nan
    return [f"  {split}", count["documents"], count["bytes"], count["tokens"], ratio]


def _wrapped(line: str) -> str:
    """Wrap a line at 80 columns; a longer name is not broken."""
    return textwrap.fill(
        line, 80, initial_indent="  ", subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )
