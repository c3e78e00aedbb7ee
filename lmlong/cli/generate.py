"""`lmlong generate`: continue a text with a trained model."""

from pathlib import Path
from typing import Any, Literal

import click

from lmlong.cli import options
from lmlong.cli.sampling_flags import sampling_flags, sampling_of
from lmlong.errors import UsageError
from lmlong.model.sampling_options import MAX_TOKENS


@click.command()
@options.run
@click.option("--prompt", metavar="TEXT", help='Text to continue; "" starts a new document.')
@click.option("--prompt-file", type=options.InFile(), help="File that holds the text to continue, of any size.")
@click.option(
    "--prompts", type=options.InFile(), help='Many texts to continue: .jsonl lines such as {"prompt": "Once"}.'
)
@click.option("--batch", default=16, show_default=True, type=click.IntRange(1), help="--prompts: how many at a time.")
@click.option(
    "--chat", is_flag=True, help="Talk with a model made for chat: a line, its answer, and so on until Ctrl-D."
)
@click.option("--system", metavar="TEXT", help="--chat: what the model is told before the first line.")
@click.option("--samples", default=1, show_default=True, type=click.IntRange(1), help="Continuations of each text.")
@click.option(
    "--max-tokens",
    default=MAX_TOKENS,
    show_default=True,
    metavar="N",
    type=options.Length(-1),
    help="Most tokens to write; -1 for no end.",
)
@sampling_flags
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; may be given several times.")
@click.option(
    "--heal/--no-heal",
    default=True,
    show_default=True,
    help="Let the prompt end anywhere, within a word too; without, its last tokens are taken as they are.",
)
@click.option(
    "--load-state", type=options.SeekableFile(), help="Go on from what `lmlong state build` or --save-state remembered."
)
@click.option("--save-state", type=options.NewFile(), help="Remember prompt and printed text in this file.")
@click.option(
    "--json", "as_json", is_flag=True, help="A line of JSON for each text: tokens, log-probabilities, end, seed."
)
@click.option(
    "--fast-decode/--no-fast-decode",
    default=None,
    help="Decode by native code on a CPU, by a CUDA graph on a GPU.  [default: on a CPU]",
)
@options.weights
@options.state_dtype
@options.threads
@click.option("--stats", is_flag=True, help="Print speeds, the size of the state and the seed on standard error.")
@options.device
def generate(
    run: str,
    prompt: str | None,
    prompt_file: Path | None,
    prompts: Path | None,
    batch: int,
    chat: bool,
    system: str | None,
    samples: int,
    max_tokens: int,
    stop: tuple[str, ...],
    heal: bool,
    load_state: Path | None,
    save_state: Path | None,
    as_json: bool,
    fast_decode: bool | None,
    weights: Literal["32", "bf16", "int8"],
    state_dtype: Literal["32", "64"],
    stats: bool,
    device: str,
    **flags: Any,
) -> None:
    """Continue a text with the model of RUN: a run folder, the name of one under runs/, or a checkpoint.

    Without --prompt, --prompt-file and --prompts the prompt is what is piped in, taken as it is, newlines at its end
    too; without that, a new document begins. Only the new text goes to standard output, each piece as soon as it is
    written; a terminal shows the prompt before it, dimmed. It ends where the model ends the document, or at
    --max-tokens or --stop. Each run draws another text, unless --seed is given.

    A prompt may end anywhere, after a space or within a word too: what is written is what would follow the same text
    inside a longer one. The last tokens of the prompt, which depend on what follows, are left open, and the first new
    token begins with what they leave of the prompt. With --json that token is shown whole.

    With --chat the lines of a terminal, or all of another prompt, are messages by the chat template that an imported
    model brings, and each answer is part of the text that the next one follows.

    \b
    Example: a function, then one greedy paragraph after the text of a file.
      lmlong generate runs/quickstart --prompt 'def '
      lmlong generate quickstart --temperature 0 --stop $'\\n\\n' < start.py
    """
    from lmlong.cli import chatting, writing

    one_text = prompts is None and samples == 1
    if sum(source is not None for source in (prompt, prompt_file, prompts)) > 1:
        raise UsageError("--prompt, --prompt-file, --prompts: several given. Give one of them.")
    if chat and (not one_text or as_json or load_state or save_state or stop):
        raise UsageError(
            "--chat: is one conversation as text. Leave out --prompts, --samples, --json, --stop and states."
        )
    if system is not None and not chat:
        raise UsageError("--system: begins a conversation. Give --chat too.")
    if save_state and not one_text:
        raise UsageError("--save-state: remembers one text. Leave out --prompts and --samples.")

    from lmlong.inference.loading import load

    sampling = sampling_of(flags)
    most = None if max_tokens == -1 else max_tokens
    show = writing.Show(as_json, stats, keep=as_json, one=one_text)
    loaded = load(run, device, weights, state_dtype)
    if loaded.fast_step_at_once if fast_decode is None else fast_decode:
        loaded.use_fast_step()
    if chat:
        chatting.talk(loaded.conversation(system), prompt, prompt_file, sampling, most)
        return
    start = loaded.load_state(load_state) if load_state else None
    end = (most, stop)
    if prompts:
        for rows, session in writing.read_many(loaded, prompts, batch, start, heal, show):
            show.write(loaded, session, sampling, rows, samples, *end)
    else:
        row, session = writing.read_one(loaded, prompt, prompt_file, start, heal, show)
        written = show.write(loaded, session, sampling, [row], samples, *end)
        if save_state:
            loaded.save_state(loaded.read("", written.finished(), heal=heal), save_state)
    show.finish(loaded.decoder, sampling.seed)
