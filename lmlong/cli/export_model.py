"""`lmlong export`: write a run in a format of other programs."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

import click

from lmlong.cli import options


@click.command("export")
@options.run
@click.option(
    "--to",
    type=click.Choice(["hf", "gguf", "html"]),
    required=True,
    help="Target: transformers (hf), llama.cpp (gguf), or a web page (html).",
)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder to create.")
@click.option(
    "--evaluation",
    type=options.SeekableFile(),
    metavar="FILE",
    help="The file that `lmlong eval RUN --json FILE` wrote, for the model card.",
)
@click.option(
    "--weights",
    type=click.Choice(["32", "bf16", "int8", "int4"]),
    help="--to gguf, html: format of the matrices, as in decoding by lmlong. [default: 32 in gguf, int4 in html]",
)
@options.plugin
def export(
    run: str, to: str, out: Path, evaluation: Path | None, weights: Literal["32", "bf16", "int8", "int4"] | None
) -> None:
    """Export RUN to a folder for other programs.

    For transformers, the folder contains the weights as safetensors, the tokenizer, a model card, and a module that
    runs lmlong's own model in transformers, with trust_remote_code=True. A Llama, Qwen3.5, OLMo-Hybrid or LFM2 is
    exported as such and needs neither the module nor lmlong. For llama.cpp, the folder contains a GGUF file; only a
    Llama can be exported, such as an imported model. A web page contains the model and runs it, without a server.

    \b
    lmlong export quickstart --to hf --out quickstart-hf
    lmlong export smollm2 --to gguf --weights int4 --out smollm2-gguf
    lmlong export quickstart --to html --out quickstart-page
    """
    from lmlong.errors import UsageError
    from lmlong.interop.card import read_evaluation
    from lmlong.interop.exporting import Exported
    from lmlong.interop.gguf_file import export_gguf
    from lmlong.interop.hf.export import export_hf
    from lmlong.interop.page.export import export_page
    from lmlong.report.progress import waiting

    write: Callable[..., Exported] = export_hf
    if to == "gguf":
        write = partial(export_gguf, weights=weights or "32")
    elif to == "html":
        write = partial(export_page, weights=weights or "int4")
    elif weights:
        raise UsageError(f"--weights: the export to {to} has the weights of the run. Leave it out, or use gguf.")
    with waiting(f"writing {out}"):
        exported = write(run, out, evaluation=read_evaluation(evaluation) if evaluation else None)
    click.echo(f"{out}: {exported.architecture}, {exported.parameters:,} parameters")
