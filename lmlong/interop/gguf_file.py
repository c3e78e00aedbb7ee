"""Read GGUF files of llama.cpp, of any quantization, with the library `gguf`."""

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lmlong.errors import CheckpointError, UsageError, install_command
from lmlong.interop.gguf_tokenizer import tokenizer_file
from lmlong.interop.llama import (
    ARCHITECTURE,
    LlamaConfig,
    LlamaSource,
    neighbours_to_halves,
    read_config,
    vocabulary_of,
)
from lmlong.io.checked import shown

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
"""llama.cpp's names of weights, and transformers' names."""


def open_gguf(path: Path) -> LlamaSource:
    """Return the model of a file."""
    try:
        gguf, quants = import_module("gguf"), import_module("gguf.quants")
    except ImportError:
        raise UsageError(f"{path}: gguf is not installed. Run {install_command('import')}.") from None
    try:
        reader = gguf.GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:  # the library does not validate files: a damaged one raises any error of numpy's
        raise CheckpointError(f"{path}: damaged or not a GGUF file ({error}). Fetch it again.") from None
    if (kind := fields.get("general.architecture")) != "llama":
        raise CheckpointError(
            f"{path}: general.architecture is {shown(kind)}; only llama ({ARCHITECTURE}) is supported. "
            "Use another model."
        )
    tensors = {_name(tensor.name): tensor for tensor in reader.tensors}
    config = _config(path, fields, tied="lm_head.weight" not in tensors)
    shapes = {name: tuple(int(size) for size in reversed(tensor.shape)) for name, tensor in tensors.items()}

    def read(name: str) -> Tensor:
        tensor = tensors[name]
        try:
            weight = torch.from_numpy(np.array(quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
            weight = weight.reshape(shapes[name])
        except (NotImplementedError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{path}: {tensor.name} cannot be read ({error}). Use another model.") from None
        return neighbours_to_halves(name, weight, config)

    return LlamaSource(
        str(path), config, shapes, torch.float32, read, lambda: tokenizer_file(path, fields, vocabulary_of(shapes))
    )


def _name(name: str) -> str:
    """Return transformers' name for llama.cpp's name. Return an unknown name unchanged."""
    parts = name.split(".")
    if len(parts) < 2 or parts[-1] != "weight" or parts[-2] not in NAMES:
        return name
    layer = f"model.layers.{parts[1]}." if parts[0] == "blk" else ""
    return f"{layer}{NAMES[parts[-2]]}.weight"


KEYS = {
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
"""transformers' names of a configuration's values, and llama.cpp's names."""


def _config(path: Path, fields: dict[str, Any], tied: bool) -> LlamaConfig:
    """Return the configuration."""
    if (scaling := fields.get("llama.rope.scaling.type", "none")) != "none":
        raise CheckpointError(
            f"{path}: llama.rope.scaling.type is {shown(scaling)}, which is not supported in GGUF. "
            "Import the model's folder."
        )
    keys = {name: f"llama.{key}" for name, key in KEYS.items()}
    values = {name: fields[key] for name, key in keys.items() if key in fields}
    return read_config(path, {**values, "tie_word_embeddings": tied}, keys)
