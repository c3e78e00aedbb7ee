"""lmlong generate: a trained model continues a text."""

import sys
from pathlib import Path

import click

from lmlong.errors import UsageError


@click.command()
@click.argument("run", metavar="RUN")
@click.option("--prompt", metavar="TEXT", help='Text to continue; "" starts a new document.')
@click.option("--prompt-file", type=click.Path(path_type=Path), help="File that holds the text to continue.")
@click.option(
    "--max-tokens", default=200, show_default=True, type=click.IntRange(-1), help="Most tokens to write; -1 for no end."
)
@click.option("--temperature", default=0.8, show_default=True, help="0 always takes the likeliest token.")
@click.option("--top-k", type=int, help="Draw only from so many likeliest tokens.")
@click.option(
    "--top-p", default=1.0, show_default=True, help="Draw only from the fewest likeliest with this probability."
)
@click.option(
    "--min-p", default=0.0, show_default=True, help="Draw only from those at least this share as likely as the first."
)
@click.option("--seed", default=0, show_default=True, help="The same seed gives the same text.")
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; may be given several times.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
def generate(
    run: str,
    prompt: str | None,
    prompt_file: Path | None,
    max_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float,
    min_p: float,
    seed: int,
    stop: tuple[str, ...],
    device: str,
) -> None:
    """Continue a text with the model of RUN: a run folder, the name of one under runs/, or a checkpoint.

    Without --prompt and --prompt-file the prompt is what is piped in, taken as it is, newlines at its end too; without
    that, a new document begins. Only the new text goes to standard output, not the prompt, each piece as soon as it is
    written. It ends where the model ends the document, or at --max-tokens or --stop.

    \b
    Example: a function, then one greedy paragraph after the text of a file.
      lmlong generate runs/quickstart --prompt 'def '
      lmlong generate quickstart --temperature 0 --stop $'\\n\\n' < start.py
    """
    text = _prompt(prompt, prompt_file)

    from lmlong.inference.loading import load

    pieces = load(run, device).stream(
        text,
        max_tokens=None if max_tokens == -1 else max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        stop=stop,
    )
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    if sys.stdout.isatty():
        sys.stdout.write("\n")


def _prompt(text: str | None, file: Path | None) -> str:
    """The text to continue, from where the user put it."""
    if text is not None and file is not None:
        raise UsageError("--prompt and --prompt-file: both given. Give one of them.")
    if text is not None:
        return text
    if file is None and (sys.stdin is None or sys.stdin.isatty()):
        return ""
    name = file or "standard input"
    try:
        # bytes, since reading as text would turn \r\n into \n
        return (file.read_bytes() if file else sys.stdin.buffer.read()).decode()
    except OSError as error:
        raise UsageError(f"{name}: cannot be read ({error.strerror}). Name a file with the text to continue.") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{name}: not UTF-8 at byte {error.start}. Convert the prompt to UTF-8.") from None
