"""`lmlong export`: a run as the tools that people have read it."""

from pathlib import Path

import click

from lmlong.cli import options


@click.command("export")
@options.run
@click.option(
    "--to",
    type=click.Choice(["hf", "onnx"]),
    required=True,
    help="What reads it: transformers (hf), or onnxruntime on a CPU (onnx).",
)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder to make.")
@click.option(
    "--evaluation",
    type=options.SeekableFile(),
    metavar="FILE",
    help="What `lmlong eval RUN --json FILE` told, for the card of the model.",
)
def export(run: str, to: str, out: Path, evaluation: Path | None) -> None:
    """Write RUN as a folder for another program, where lmlong is not installed.

    For transformers it holds the weights as safetensors, the tokenizer, a card of the model, and one module of plain
    torch, which transformers runs with trust_remote_code=True; a model that is a Llama leaves as one, and needs no such
    module. For onnxruntime it holds one graph that reads and writes, with its state as inputs and outputs, and needs
    no torch. An hourglass and plug-ins are refused.

    \b
    lmlong export quickstart --to hf --out quickstart-hf
    lmlong export quickstart --to onnx --out quickstart-onnx
    """
    from lmlong.interop.card import read_evaluation
    from lmlong.interop.hf.export import export_hf
    from lmlong.interop.onnx.export import export_onnx

    write = {"hf": export_hf, "onnx": export_onnx}[to]
    made = write(run, out, read_evaluation(evaluation) if evaluation else None)
    click.echo(f"{out}: {made.architecture}, {made.parameters:,} parameters")
