"""`lmlong generate`: continue a text with a trained model."""

import sys
from pathlib import Path
from typing import Any

import click

from lmlong.cli import options
from lmlong.errors import UsageError
from lmlong.model.sampling_options import DEFAULTS, MAX_TOKENS, Sampling, random_seed


@click.command()
@options.run
@click.option("--prompt", metavar="TEXT", help='Text to continue; "" adds none to a state, or begins a document.')
@click.option(
    "--prompts",
    type=options.InFile(),
    help='Many texts to continue: a .jsonl file of lines such as {"prompt": "Once"}.',
)
@click.option("--chat", is_flag=True, help="Chat with a model trained for it, line by line until Ctrl-D.")
@click.option("--samples", default=1, type=click.IntRange(1), help="Number of continuations of each text.")
@click.option(
    "--max-tokens",
    default=MAX_TOKENS,
    metavar="N",
    type=options.TokenCount(0, or_unlimited=True),
    help="Maximum number of tokens to generate, or unlimited.",
)
@click.option(
    "--temperature",
    default=DEFAULTS.temperature,
    help="Values below 1 favor likely tokens; 0 always takes the most likely one.",
)
@click.option("--top-k", type=int, help="Sample from this many most likely tokens.")
@click.option(
    "--top-p",
    default=DEFAULTS.top_p,
    help="Sample from the smallest set of most likely tokens with this total probability.",
)
@click.option(
    "--seed", type=int, help="The same seed gives the same text.  [default: random; --stats and --json print it]"
)
@click.option(
    "--stop", multiple=True, metavar="TEXT", help="Stop before this text, a line break by $'\\n'; repeatable."
)
@options.load_state
@options.save_state
@click.option(
    "--json", "as_json", is_flag=True, help="Print a line of JSON for each text: tokens, log-probabilities, end, seed."
)
@click.option(
    "--fast-decode/--no-fast-decode",
    default=None,
    help="Decode with native code on a CPU, or a CUDA graph on a GPU.  [default: on a CPU]",
)
@click.option("--stats", is_flag=True, help="Print speed, drafts, state size and seed to standard error.")
@click.option("--ignore-eos", is_flag=True, help="Never draw the end of the document.")
@options.loading
def generate(
    run: str,
    prompt: str | None,
    prompts: Path | None,
    chat: bool,
    samples: int,
    max_tokens: int | None,
    temperature: float,
    top_k: int | None,
    top_p: float,
    seed: int | None,
    stop: tuple[str, ...],
    load_state: Path | None,
    save_state: Path | None,
    as_json: bool,
    fast_decode: bool | None,
    stats: bool,
    ignore_eos: bool,
    **loading: Any,
) -> None:
    """Continue a text with the model of RUN: a run folder, the name of one under runs/, or a checkpoint.

    Without --prompt and --prompts, the prompt is read from standard input if that is piped, including
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
    from lmlong.cli.reading import Prompt, many, pieces
    from lmlong.cli.writing import BATCH, TextOutput, talk
    from lmlong.inference.loading import load
    from lmlong.inference.state_file import tail_of

    one_text = prompts is None and samples == 1
    if prompt is not None and prompts is not None:
        raise UsageError("--prompt, --prompts: mutually exclusive. Give one of them.")
    if chat and (not one_text or as_json or load_state or save_state or stop):
        raise UsageError(
            "--chat: cannot be combined with --prompts, --samples, --json, --stop or states. Leave them out."
        )
    if save_state and not one_text:
        raise UsageError("--save-state: saves the state of one text. Leave out --prompts and --samples.")

    chosen = random_seed() if seed is None else seed
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, ignore_eos=ignore_eos, seed=chosen)
    loaded = load(run, **loading)
    loaded.use_fast_engine(fast_decode)
    if chat:
        talk(loaded.conversation(), prompt, sampling, max_tokens)
        return
    start = loaded.load_state(load_state) if load_state else None
    output = TextOutput(loaded, sampling, start, samples, max_tokens, stop, as_json)
    if prompts:
        everything = many(prompts)
        if not everything:
            raise UsageError(f"{prompts}: contains no prompt.")
        for first in range(0, len(everything), BATCH):
            batch = everything[first : first + BATCH]
            output.write(batch, [output.read(each.text) for each in batch], first)
    else:
        is_piped = prompt is None and not sys.stdin.isatty()
        session = output.read(pieces(None) if is_piped else prompt or "")
        shown = tail_of(session, loaded.tokenizer) if is_piped else prompt or ""
        if one_text and not as_json:
            output.stream(session, shown)
        else:
            output.write([Prompt(shown, {})], [session])
    if save_state:
        loaded.save_state(loaded.read("", output.generation.finished()), save_state)
    if stats:
        click.echo(output.statistics(), err=True)
