"""`lmlong state`: save and describe the state of a model after a text."""

from pathlib import Path
from typing import Any

import click

from lmlong.cli import options
from lmlong.cli.output import show_facts


@click.group()
def state() -> None:
    """Save the state after a text to a file, from which generation continues without reading the text again."""


@state.command()
@options.run
@click.argument("text", type=options.TextFile(), metavar="TEXT")
@click.option("-o", "--out", type=options.NewFile(), required=True, help="The state file to write.")
@options.load_state
@options.state_dtype
@options.threads
@options.loading
def build(run: str, text: Path, out: Path, load_state: Path | None, **loading: Any) -> None:
    """Read TEXT with the model of RUN and save the state after it.

    TEXT may end anywhere, even within a word: its last tokens, which depend on the following text, are saved as text
    and read together with it.

    The size of the file hardly depends on TEXT: it is about what `lmlong info RUN` prints as state bytes,
    23 MiB for the model of quickstart.

    \b
    lmlong state build runs/book book.txt -o book.state
    lmlong generate runs/book --load-state book.state --prompt 'Once more, '
    """
    from lmlong.cli.reading import pieces
    from lmlong.inference.loading import load

    loaded = load(run, **loading)
    before = loaded.load_state(load_state) if load_state else None
    session = loaded.read(pieces(text), before, precision=loaded.set_up_evaluation(None))
    loaded.save_state(session, out)
    click.echo(f"{out}: {session.total:,} tokens saved in {out.stat().st_size:,} bytes")


@state.command()
@click.argument("file", type=options.SeekableFile(), metavar="FILE")
@options.json_file
def info(file: Path, json_file: Path | None) -> None:
    """Describe a state FILE: its text and its model.

    \b
    lmlong state info book.state
    """
    import json

    from lmlong.inference.state_file import describe

    about = {**describe(file), "bytes": file.stat().st_size}
    shown = {**about, "tail": json.dumps(about["tail"][-60:])}
    shown |= {name: f"{about[name]:,}" for name in ("tokens", "bytes")}
    show_facts("\n".join(f"{name:12} {value}" for name, value in shown.items()), about, json_file)
