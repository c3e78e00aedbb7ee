"""`lmlong import`: a run folder made of a model of others."""

from pathlib import Path

import click


@click.command("import")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Run folder to make.")
def import_(path: Path, out: Path) -> None:
    """Make a run of the model at PATH, with which all commands work.

    Nothing is downloaded: get the model first, for example by `hf download`. PATH is a folder that transformers wrote
    (config.json, safetensors, tokenizer.json), a GGUF file, whose quantized weights are read as float32, or a .bin of
    llama2.c with its tokenizer.bin beside it. LlamaForCausalLM is known: Llama, SmolLM2, TinyLlama. A chat template
    comes in too, for `lmlong generate RUN --chat`; training on conversations is left out, as a source is whole texts.

    \b
    lmlong import SmolLM2-135M --out runs/smollm2
    lmlong generate runs/smollm2 --prompt 'Once upon a time'
    """
    import shlex

    from lmlong.cli.report import under_next
    from lmlong.interop.importing import import_model

    made = import_model(path, out)
    click.echo(f"{out}: {made.parameters:,} parameters, trained to read {made.context:,} tokens")
    if made.lost:
        listed = ", ".join(f"0x{byte:02X}" for byte in made.lost)
        click.echo(f"{out}: its tokenizer has no token for the bytes {listed}, and leaves them out of a text", err=True)
    run, book = shlex.quote(str(out)), "text.sources.0.paths=my-books"
    commands = [
        f"lmlong generate {run} --prompt 'Once upon a time'",
        f"lmlong eval {run} --data my-book.txt",
        f"lmlong train adapt training.init_from={run} {book}",
        f"lmlong convert {run} --to convert {book}",
    ]
    click.echo(f"\n{under_next(commands)}")
