"""`lmlong import`: create a run folder from a pretrained model."""

from pathlib import Path

import click


@click.command("import")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Run folder to create.")
def import_(path: Path, out: Path) -> None:
    """Import the pretrained model at PATH as a run for all commands.

    Nothing is downloaded: get the model first, for example with `hf download`. PATH is a folder in the format of
    transformers (config.json, safetensors, tokenizer.json), or a GGUF file, whose quantized weights become float32.
    Supported are Llama, SmolLM2, TinyLlama, Qwen3.5, OLMo-Hybrid and LFM2, all without experts. A chat template is
    imported for `lmlong generate RUN --chat`; training on conversations is not supported.

    \b
    lmlong import Qwen3.5-0.8B --out runs/qwen
    lmlong generate runs/qwen --weights int4 --prompt 'Once upon a time'
    """
    import shlex

    from lmlong.cli.after_training import under_next
    from lmlong.interop.importing import import_model

    imported = import_model(path, out)
    click.echo(f"{out}: {imported.parameters:,} parameters, trained to read {imported.context:,} tokens")
    if imported.left_out:
        click.echo(f"{out}: without {' and '.join(imported.left_out)}", err=True)
    if imported.lost:
        listed = ", ".join(f"0x{byte:02X}" for byte in imported.lost)
        click.echo(f"{out}: the tokenizer has no token for the bytes {listed}, and removes them from a text", err=True)
    run, book = shlex.quote(str(out)), "text.sources.0.paths=my-books"
    commands = [
        f"lmlong generate {run} --prompt 'Once upon a time'",
        f"lmlong eval {run} --data my-book.txt",
        f"lmlong train adapt training.init_from={run} {book}",
        f"lmlong convert {run} --to convert {book}",
    ]
    click.echo(f"\n{under_next(commands)}")
