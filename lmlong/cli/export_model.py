"""`lmlong export`: write a run in a format of other programs."""

from pathlib import Path

import click

from lmlong.cli import options


@click.command("export")
@options.run
@click.option(
    "--to",
    type=click.Choice(["hf", "onnx"]),
    required=True,
    help="Target: transformers (hf), or onnxruntime on a CPU (onnx).",
)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder to create.")
@click.option(
    "--evaluation",
    type=options.SeekableFile(),
    metavar="FILE",
    help="The file that `lmlong eval RUN --json FILE` wrote, for the model card.",
)
def export(run: str, to: str, out: Path, evaluation: Path | None) -> None:
    """Export RUN to a folder for a program without lmlong.

    For transformers, the folder contains the weights as safetensors, the tokenizer, a model card, and a module of plain
    torch, which transformers runs with trust_remote_code=True. A Llama model is exported as one and needs no module.
    For onnxruntime, it contains one graph for prefill and decode, with the state as inputs and outputs; torch is not
    needed. Hourglass models and plug-ins are not supported.

    \b
    lmlong export quickstart --to hf --out quickstart-hf
    lmlong export quickstart --to onnx --out quickstart-onnx
    """
    from lmlong.interop.card import read_evaluation
    from lmlong.interop.hf.export import export_hf
    from lmlong.interop.onnx.export import export_onnx

    write = {"hf": export_hf, "onnx": export_onnx}[to]
    exported = write(run, out, read_evaluation(evaluation) if evaluation else None)
    click.echo(f"{out}: {exported.architecture}, {exported.parameters:,} parameters")
