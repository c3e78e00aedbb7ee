"""`lmlong generate`: continue a text with a trained model."""

from pathlib import Path
from typing import Any

import click

from lmlong.cli import options
from lmlong.cli.sampling_flags import sampling_flags, sampling_of
from lmlong.errors import UsageError
from lmlong.model.sampling_options import MAX_TOKENS


@click.command()
@options.run
@click.option("--prompt", metavar="TEXT", help='Text to continue; "" starts a new document.')
@click.option("--prompt-file", type=options.TextFile(), help="File with the text to continue, of any size.")
@click.option(
    "--prompts",
    type=options.InFile(),
    help='Many texts to continue: a .jsonl file of lines such as {"prompt": "Once"}.',
)
@click.option("--batch", default=16, type=click.IntRange(1), help="With --prompts: batch size.")
@click.option("--chat", is_flag=True, help="Chat with a model trained for it, line by line until Ctrl-D.")
@click.option("--system", metavar="TEXT", help="With --chat: the system message.")
@click.option("--samples", default=1, type=click.IntRange(1), help="Number of continuations of each text.")
@click.option(
    "--max-tokens",
    default=MAX_TOKENS,
    metavar="N",
    type=options.TokenLimit(0),
    help="Maximum number of tokens to generate, or unlimited.",
)
@sampling_flags
@click.option("--stop", multiple=True, metavar="TEXT", help="Stop before this text; repeatable.")
@click.option(
    "--heal/--no-heal",
    default=True,
    help="Allow the prompt to end anywhere, even within a word; with --no-heal its tokens are used unchanged.",
)
@click.option(
    "--load-state",
    type=options.SeekableFile(),
    help="Continue from a state that `lmlong state build` or --save-state wrote.",
)
@click.option(
    "--save-state", type=options.NewFile(), help="Save the state after the prompt and the generated text to this file."
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print a line of JSON for each text: tokens, log-probabilities, end, seed."
)
@click.option(
    "--fast-decode/--no-fast-decode",
    default=None,
    help="Decode with native code on a CPU, or a CUDA graph on a GPU.  [default: on a CPU]",
)
@click.option(
    "--drafts/--no-drafts",
    default=True,
    help="Read likely next tokens ahead with native code where that is faster; the text stays the same.",
)
@click.option("--stats", is_flag=True, help="Print speed, drafts, state size and seed to standard error.")
@options.learn
@options.loading
def generate(
    run: str,
    prompt: str | None,
    prompt_file: Path | None,
    prompts: Path | None,
    batch: int,
    chat: bool,
    system: str | None,
    samples: int,
    max_tokens: int | None,
    stop: tuple[str, ...],
    heal: bool,
    load_state: Path | None,
    save_state: Path | None,
    as_json: bool,
    fast_decode: bool | None,
    drafts: bool,
    stats: bool,
    loading: options.Loading,
    **flags: Any,
) -> None:
    """Continue a text with the model of RUN: a run folder, the name of one under runs/, or a checkpoint.

    Without --prompt, --prompt-file and --prompts, the prompt is read from standard input if that is piped, including
    newlines at its end; otherwise a new document starts. Only the generated text goes to standard output, streamed as
    it is generated; a terminal shows the prompt before it, dimmed. Generation stops when the model ends the document,
    or at --max-tokens or --stop. Each call samples another text, unless --seed is given.

    A prompt may end anywhere, even after a space or within a word: it is tokenized as part of a longer text. Its last
    tokens, which depend on the following text, are removed, and the first generated token starts with their text. With
    --json that token is printed as a whole.

    With --chat each line of a terminal, or another prompt as a whole, is a message in the chat template of an imported
    model, and the conversation is kept.

    \b
    Example: a function, then one greedy paragraph that continues a file.
      lmlong generate runs/quickstart --prompt 'def '
      lmlong generate quickstart --temperature 0 --stop $'\\n\\n' < start.py
    """
    from lmlong.cli import chatting, writing

    one_text = prompts is None and samples == 1
    if sum(source is not None for source in (prompt, prompt_file, prompts)) > 1:
        raise UsageError("--prompt, --prompt-file, --prompts: mutually exclusive. Give one of them.")
    if chat and (not one_text or as_json or load_state or save_state or stop):
        raise UsageError(
            "--chat: cannot be combined with --prompts, --samples, --json, --stop or states. Leave them out."
        )
    if system is not None and not chat:
        raise UsageError("--system: needs --chat.")
    if save_state and not one_text:
        raise UsageError("--save-state: saves the state of one text. Leave out --prompts and --samples.")

    sampling = sampling_of(flags)
    output = writing.TextOutput(as_json, stats, one_text, drafts)
    loaded = loading.load(run)
    if loaded.fast_step_at_once if fast_decode is None else fast_decode:
        loaded.use_fast_step()
    if chat:
        chatting.talk(loaded.conversation(system), prompt, prompt_file, sampling, max_tokens)
        return
    start = loaded.load_state(load_state) if load_state else None
    end = (max_tokens, stop)
    if prompts:
        for rows, session in writing.read_many(loaded, prompts, batch, start, heal, output):
            output.write(loaded, session, sampling, rows, samples, *end)
    else:
        row, session = writing.read_one(loaded, prompt, prompt_file, start, heal, output)
        generation = output.write(loaded, session, sampling, [row], samples, *end)
        if save_state:
            loaded.save_state(loaded.read("", generation.finished(), heal=heal), save_state)
    output.finish(loaded.decoder, sampling.seed)
