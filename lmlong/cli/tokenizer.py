"""`lmlong tokenizer`: train a tokenizer by itself, and describe one."""

import json
from pathlib import Path

import click

from lmlong.cli import options
from lmlong.cli.plugins import load_recipe


@click.group()
def tokenizer() -> None:
    """Train and examine tokenizers.

    \b
    Example: train one, then see how it cuts a line.
      lmlong tokenizer train quickstart --out code.model
      lmlong tokenizer info code.model --text "for line in lines:"
    """


@tokenizer.command()
@options.recipe(default="quickstart")
@options.overrides
@click.option("--out", required=True, type=click.Path(dir_okay=False, path_type=Path), help="The file to write.")
def train(recipe: str, overrides: tuple[str, ...], out: Path) -> None:
    """Train the tokenizer of RECIPE (a file or a shipped name) on its training text, and write it to a file.

    \b
    Example: the pieces of your own books.
      lmlong tokenizer train books.yaml --out books.model
    """
    from lmlong.data.sources import check_quickly, open_inputs
    from lmlong.data.tokenizers.training import tokenizer_of

    text = load_recipe(recipe, overrides).text
    check_quickly(text)
    made = tokenizer_of(open_inputs(text), text.tokenizer, text.duplicates)
    made.save(out)
    click.echo(out)


@tokenizer.command()
@click.argument("path", metavar="FILE_OR_RUN", type=click.Path(exists=True, path_type=Path))
@click.option("--text", help="A text to cut into tokens.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def info(path: Path, text: str | None, as_json: bool) -> None:
    """Describe the tokenizer in a file or in a run's folder.

    \b
    Example: how does it cut this line?
      lmlong tokenizer info runs/quickstart --text "for line in lines:"
    """
    from lmlong.data.tokenizers.factory import load_tokenizer

    found = load_tokenizer(path / "tokenizer.model" if path.is_dir() else path)
    facts = {"vocabulary": found.vocabulary, "bos": found.bos, "eos": found.eos, "hash": found.hash}
    if text is not None:
        tokens = found.encode(text)
        size = int(found.token_bytes[tokens].sum())
        facts |= {"tokens": tokens, "pieces": [found.decode([token]) for token in tokens], "bytes": size}
    if as_json:
        click.echo(json.dumps(facts, indent=2))
    else:
        click.echo("\n".join(f"{name:<10}  {value}" for name, value in facts.items()))
