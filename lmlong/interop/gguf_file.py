"""GGUF files of llama.cpp, by the library `gguf`, whatever their quantization."""

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lmlong.data.huggingface_tokenizer import wrapped
from lmlong.errors import UsageError
from lmlong.interop.gguf_tokenizer import tokenizer_json
from lmlong.interop.llama import ARCHITECTURE, Source, neighbours_to_halves

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Weights by the names of llama.cpp and of transformers."""


def open_gguf(path: Path) -> Source:
    """Return the model of a file."""
    try:
        gguf, quants = import_module("gguf"), import_module("gguf.quants")
    except ImportError:
        raise UsageError(f"{path}: is read by another library. Install it by pip install 'lmlong[import]'.") from None
    try:
        reader = gguf.GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:  # the library reads a damaged file as far as numpy lets it
        raise UsageError(f"{path}: no GGUF file, or damaged ({error}). Fetch it again.") from None
    kind = fields.get("general.architecture")
    if kind != "llama":
        raise UsageError(f"{path}: a model of the kind {kind!r}, where llama alone is known ({ARCHITECTURE}).")
    config, tensors = _config(path, fields), {_name(tensor.name): tensor for tensor in reader.tensors}
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    shapes = {name: tuple(int(size) for size in reversed(tensor.shape)) for name, tensor in tensors.items()}

    def read(name: str) -> Tensor:
        tensor = tensors[name]
        weight = torch.from_numpy(np.array(quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
        weight = weight.reshape(shapes[name])
        return neighbours_to_halves(name, weight, config)

    def tokenizer() -> bytes:
        about = {n.removeprefix("tokenizer.ggml."): v for n, v in fields.items() if n.startswith("tokenizer.ggml.")}
        try:
            spec, eos = tokenizer_json(about), about["eos_token_id"]
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"{path}: its tokenizer is not whole ({error}). Use another file.") from None
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from None
        template = fields.get("tokenizer.chat_template")
        rows = shapes.get("model.embed_tokens.weight", (None,))[0]
        return wrapped(spec, about.get("bos_token_id", eos), eos, rows, template)

    return Source(str(path), config, shapes, torch.float32, read, tokenizer)


def _name(name: str) -> str:
    """Return the name of transformers for one of llama.cpp; another name stays."""
    parts = name.split(".")
    if len(parts) < 2 or parts[-1] != "weight" or parts[-2] not in NAMES:
        return name
    layer = f"model.layers.{parts[1]}." if parts[0] == "blk" else ""
    return f"{layer}{NAMES[parts[-2]]}.weight"


def _config(path: Path, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration by the names of transformers."""
    wanted = {
        "hidden_size": "embedding_length",
        "num_hidden_layers": "block_count",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "intermediate_size": "feed_forward_length",
        "max_position_embeddings": "context_length",
        "head_dim": "rope.dimension_count",
        "rms_norm_eps": "attention.layer_norm_rms_epsilon",
        "rope_theta": "rope.freq_base",
    }
    found = {ours: fields[f"llama.{theirs}"] for ours, theirs in wanted.items() if f"llama.{theirs}" in fields}
    found.setdefault("num_key_value_heads", found.get("num_attention_heads"))
    if (scaling := fields.get("llama.rope.scaling.type", "none")) != "none":
        raise UsageError(f"{path}: its rotary positions are scaled by {scaling!r}, which is not read from GGUF.")
    return found
