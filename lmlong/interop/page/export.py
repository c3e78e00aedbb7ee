"""Export a run as a web page: one file that runs the model in a browser, without a server."""

import base64
import json
import re
from pathlib import Path
from string import Template
from typing import Any

from lmlong.checkpoint import manifest, read
from lmlong.checkpoint.owners import owners
from lmlong.decode.image import Image, image_of, page_code
from lmlong.errors import UsageError
from lmlong.interop.exporting import Exported, open_export, write_folder
from lmlong.interop.page.tokenizer import page_tokenizer
from lmlong.model.base import count_parameters
from lmlong.model.language_model import CACHE_DTYPE, LanguageModel
from lmlong.model.quantization import Weights
from lmlong.model.sampling_options import DEFAULTS, MAX_TOKENS
from lmlong.native.decode.packer import NoNativeForm
from lmlong.native.prebuilt import FOLDER, WASM, library_path

HERE, SERVED = Path(__file__).parent, Path(__file__).parents[2] / "serving" / "page"
MODEL = [HERE / f"{name}.js" for name in ("engine", "tokenizer", "sampling", "state", "model")]
APP = [SERVED / "dom.js", SERVED / "tokens.js", HERE / "app.js"]
PAGE, MODULE = "index.html", "lmlong.mjs"

PIECE = 3 << 20
"""Bytes of weights that a page decodes at once."""


def export_page(
    run: str, folder: Path, weights: Weights = "int4", evaluation: dict[str, Any] | None = None
) -> Exported:
    """Write a run as a folder with a page that runs it, and a module for programs in JavaScript, atomically. `weights`
    is the format of its matrices; with int4 and int8, tables of n-grams have it too, and embeddings are in int8."""
    if evaluation is not None:
        raise UsageError("--evaluation: a page has no model card. Leave it out.")
    source = open_export(run, folder)
    step = wasm()
    model, about, image = read.reading(run, lambda checkpoint: _read(checkpoint, weights))
    about |= {"run": Path(run).name, "description": f"{source.parameters:,} parameters"}
    files = {PAGE: page(about, image.data, step), MODULE: bundle(MODEL, keeps_exports=True)}
    write_folder(folder, files, lambda into: None)
    return Exported(folder, count_parameters(model), "a web page")


def wasm() -> bytes:
    """Return the decode step for browsers."""
    path = library_path(FOLDER, WASM, page_code())
    if not path.is_file():
        raise UsageError(
            f"--to html: {path} is missing. Install a wheel, or run `tools/release native {FOLDER} --levels {WASM}`."
        )
    return path.read_bytes()


def _read(checkpoint: Path, weights: Weights) -> tuple[LanguageModel, dict[str, Any], Image]:
    """Return the model of a checkpoint, what its page says of it, and its memory."""
    _, tokenizer, model = read.read_model(checkpoint, weights)
    assert isinstance(model, LanguageModel), "`open_export` refuses encoders"
    model.set_cache_dtype(CACHE_DTYPE)
    hashes = owners(model, tokenizer, manifest.read(checkpoint).files[manifest.WEIGHTS]["sha256"])
    try:
        image = image_of(model, weights if weights in ("int8", "int4") else None)
    except NoNativeForm as unknown:
        raise UsageError(f"--to html: {unknown.why}. Use --to hf.") from None
    return model, {"owners": hashes, "tokenizer": page_tokenizer(tokenizer), "image": layout(model, image)}, image


def layout(model: LanguageModel, image: Image) -> dict[str, Any]:
    """Return what a page says of its memory (engine.js)."""
    return {
        **{name: value for name, value in image._asdict().items() if name != "data"},
        "state": image.state and [tensor._asdict() for tensor in image.state],
        "vocabulary": model.lm_head.rows,
        "pastTokens": model.past_tokens or 0,
        "keepsTokens": model.past_tokens is not None,
    }


def page(about: dict[str, Any], weights: bytes, step: bytes) -> str:
    """Return the HTML of a page."""
    parts = [
        ("worker", bundle([*MODEL, HERE / "worker.js"])),
        ("about", json.dumps(about, separators=(",", ":")).replace("<", "\\u003c")),
        ("wasm", base64.b64encode(step).decode()),
        *(("weights", base64.b64encode(weights[at : at + PIECE]).decode()) for at in range(0, len(weights), PIECE)),
    ]
    return Template((HERE / "index.html").read_text(encoding="utf-8")).substitute(
        style=(SERVED / "style.css").read_text(encoding="utf-8"),
        app=bundle(APP),
        parts="\n".join(f'<script type="text/plain" class="{name}">{text}</script>' for name, text in parts),
        max_tokens=MAX_TOKENS,
        temperature=DEFAULTS.temperature,
    )


def bundle(files: list[Path], keeps_exports: bool = False) -> str:
    """Return modules as one, each after those that it imports. Only the last one keeps its exports, if any does."""
    texts = []
    for file in files:
        text = re.sub(r"^import .*;\n", "", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
        is_public = keeps_exports and file == files[-1]
        texts.append(text if is_public else re.sub(r"^export ", "", text, flags=re.MULTILINE))
    return "\n".join(texts)
