"""`lmlong state`: the state of a model after a text, as a file."""

from pathlib import Path
from typing import Literal

import click

from lmlong.cli import options


@click.group()
def state() -> None:
    """Save the state after a text as a file, and continue from it at once."""


@state.command()
@options.run
@click.argument("text", type=options.InFile(), metavar="TEXT")
@click.option("-o", "--out", type=options.NewFile(), required=True, help="The state file to write.")
@click.option(
    "--load-state", type=options.SeekableFile(), help="Go on from this state instead of beginning a document."
)
@options.state_dtype
@options.threads
@options.device
def build(
    run: str, text: Path, out: Path, load_state: Path | None, state_dtype: Literal["32", "64"], device: str
) -> None:
    """Read TEXT with the model of RUN and save the state after it.

    TEXT may end anywhere, within a word too: its last tokens, which depend on what follows, are kept as text and read
    together with that.

    However long TEXT is, the file is hardly larger than what `lmlong info RUN` prints as state bytes: 24 MB for the
    model of quickstart.

    \b
    lmlong state build runs/book book.txt -o book.state
    lmlong generate runs/book --load-state book.state --prompt 'Once more, '
    """
    from lmlong.cli.reading import pieces
    from lmlong.inference.loading import load

    loaded = load(run, device, state_dtype=state_dtype)
    session = loaded.read(pieces(text), loaded.load_state(load_state) if load_state else None)
    loaded.save_state(session, out)
    click.echo(f"{out}: {int(session.total):,} tokens saved in {out.stat().st_size:,} bytes")


@state.command()
@click.argument("file", type=options.SeekableFile(), metavar="FILE")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def info(file: Path, as_json: bool) -> None:
    """Describe a state FILE: its text and the model that it belongs to.

    \b
    lmlong state info book.state
    """
    import json

    from lmlong.inference.state_file import describe

    about = {**describe(file), "bytes": file.stat().st_size}
    if as_json:
        click.echo(json.dumps(about))
        return
    for name, value in about.items():
        shown = f"{value:,}" if name in ("tokens", "bytes") else json.dumps(value[-60:]) if name == "tail" else value
        click.echo(f"{name:12} {shown}")
