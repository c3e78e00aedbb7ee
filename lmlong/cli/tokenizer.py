"""`lmlong tokenizer`: train and describe tokenizers."""

from pathlib import Path

import click

from lmlong.cli import options
from lmlong.cli.output import show
from lmlong.cli.plugins import load_recipe


@click.group()
def tokenizer() -> None:
    """Train and inspect tokenizers.

    \b
    Example: train one, then tokenize a line.
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
    Example: a tokenizer for your own books.
      lmlong tokenizer train books.yaml --out books.model
    """
    from lmlong.data.sources import check_quickly, open_inputs
    from lmlong.data.tokenizers.training import tokenizer_of

    text = load_recipe(recipe, overrides).text
    check_quickly(text)
    trained = tokenizer_of(open_inputs(text), text.tokenizer, text.duplicates)
    trained.save(out)
    click.echo(out)


@tokenizer.command()
@click.argument("path", metavar="FILE_OR_RUN", type=click.Path(exists=True, path_type=Path))
@click.option("--text", help="A text to tokenize.")
@options.json_file
def info(path: Path, text: str | None, json_file: Path | None) -> None:
    """Describe the tokenizer in a file or in a run's folder.

    \b
    Example: the tokens of a line.
      lmlong tokenizer info runs/quickstart --text "for line in lines:"
    """
    from lmlong.data.tokenizers.factory import load_tokenizer

    loaded = load_tokenizer(path / "tokenizer.model" if path.is_dir() else path)
    facts = {"vocabulary": loaded.vocabulary, "bos": loaded.bos, "eos": loaded.eos, "hash": loaded.hash}
    if text is not None:
        tokens = loaded.encode(text)
        size = int(loaded.token_bytes[tokens].sum())
        facts |= {"tokens": tokens, "pieces": [loaded.decode([token]) for token in tokens], "bytes": size}
    show("\n".join(f"{name:<10}  {value}" for name, value in facts.items()), facts, json_file)
