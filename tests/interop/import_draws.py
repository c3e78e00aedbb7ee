"""Random pretrained models: whole folders and GGUF files with hostile values."""

import json
import random
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import gguf
from crafted_values import VALUES, places, replaced
from safetensors.torch import save
from torch import Tensor

from lmlong.errors import CheckpointError
from lmlong.interop.importing import import_model

from .tiny_hybrids import HYBRIDS, source, write_qwen_gguf
from .tiny_llama import CONFIG, LLAMA3, PIECES, byte_level, weights, write_gguf

PRE_TOKENIZERS = [
    {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    {"type": "ByteLevel"},
    {"type": "Digits", "individual_digits": True},
    {"type": "FixedLength", "length": 0},
    {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"},
    {"type": "Punctuation", "behavior": "Removed"},
    {"type": "Split", "pattern": {"Regex": ""}, "behavior": "Isolated", "invert": False},
    {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Removed", "invert": True},
    {"type": "WhitespaceSplit"},
    {"type": "UnicodeScripts"},
]
EXTRA = {"rope_scaling": LLAMA3, "rope_parameters": {**LLAMA3, "rope_theta": 500.0}, "head_dim": 8, "mlp_bias": False}


def model(name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The configuration and the weights of a Llama, or of a hybrid."""
    return ({**CONFIG, **EXTRA}, weights(CONFIG)) if name == "Llama" else source(name)


@cache
def parts(name: str) -> dict[str, Any]:
    """The files of a folder, as values."""
    ends = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": "{{ messages }}"}
    config, given = model(name)
    index = {"weight_map": dict.fromkeys(given, "model.safetensors")}
    tokenizer = json.loads(byte_level().to_str())
    return {"config": config, "tokenizer": tokenizer, "tokenizer_config": ends, "index": index}


@cache
def safetensors(name: str) -> bytes:
    return save(model(name)[1])


def nested(draw: random.Random) -> Any:
    """Pre-tokenizers beside and inside each other."""
    made = [draw.choice(PRE_TOKENIZERS) for _ in range(draw.choice([1, 2, 3, 50, 100]))]
    part: Any = {"type": "Sequence", "pretokenizers": made}
    for _ in range(draw.choice([0, 1, 2, 50])):
        part = {"type": "Sequence", "pretokenizers": [part]}
    return part


def write_drawn_folder(folder: Path, draw: random.Random) -> Path:
    """Write a folder of transformers with a few values changed."""
    folder.mkdir()
    kind = draw.choice(["Llama", *HYBRIDS])
    files = dict(parts(kind))
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        name = draw.choice(["config", "config", "tokenizer", "tokenizer", "tokenizer_config", "index"])
        if name == "tokenizer" and isinstance(files[name], dict) and draw.random() < 0.3:
            files[name] = {**files[name], "pre_tokenizer": nested(draw)}
        else:
            files[name] = replaced(files[name], draw.choice(places(files[name])), draw.choice(VALUES))
    names = {"config": "config.json", "tokenizer": "tokenizer.json", "tokenizer_config": "tokenizer_config.json"}
    for name, file in names.items():
        (folder / file).write_text(json.dumps(files[name]))
    if files["index"] is not parts(kind)["index"] or draw.random() < 0.1:
        (folder / "model.safetensors.index.json").write_text(json.dumps(files["index"]))
    data = safetensors(kind)
    if draw.random() < 0.1:
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        header = replaced(header, draw.choice(places(header)), draw.choice(VALUES))
        text = json.dumps(header).encode()
        data = len(text).to_bytes(8, "little") + text + data[8 + size :]
    (folder / "model.safetensors").write_bytes(data)
    return folder


class HostileWriter(gguf.GGUFWriter):
    """Writes a GGUF file in which a few fields have another value, of its own type."""

    draw: random.Random
    share = 0.1

    def add_key_value(self, key: str, val: Any, vtype: Any, sub_type: Any = None) -> None:
        if self.draw.random() >= self.share:
            super().add_key_value(key, val, vtype, sub_type)
            return
        kinds = gguf.GGUFValueType
        drawn: list[tuple[Any, Any]] = [
            *((0, kinds.UINT32), (-1, kinds.INT32), (2**63, kinds.UINT64), (True, kinds.BOOL), ("x", kinds.STRING)),
            *((float("nan"), kinds.FLOAT32), (float("inf"), kinds.FLOAT64), ("\0é", kinds.STRING)),
            *((values, kinds.ARRAY) for values in ([1, 2], ["x"], ["x" * 3000, *PIECES], ["<s>"] * 300)),
        ]
        if self.draw.random() < 0.8:
            super().add_key_value(key, *self.draw.choice(drawn))


def write_drawn_gguf(path: Path, draw: random.Random) -> Path:
    """Write a GGUF file with a few fields changed or left out."""
    HostileWriter.draw = draw
    if draw.random() < 0.5:
        return write_qwen_gguf(path, *source("Qwen3_5ForCausalLM"), writing=HostileWriter)
    return write_gguf(path, CONFIG, weights(CONFIG), HostileWriter)


def try_import(draw: random.Random, place: Path) -> tuple[str, list[str]]:
    """Import a drawn model; return the outcome, and what is wrong."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    kind = draw.choice(["folder", "folder", "folder", "gguf"])
    source = write_drawn_folder(place / "m", draw) if kind == "folder" else write_drawn_gguf(place / "m.gguf", draw)
    try:
        import_model(source, place / "run")
    except CheckpointError as error:
        message = str(error)
        printed = message == message.encode(errors="ignore").decode()
        complaints = [] if printed and str(source) in message and len(message) < 5000 else [ascii(message[:1000])]
        return f"{kind} refused", complaints + ["a run is left"] * (place / "run").exists()
    return f"{kind} imported", []
