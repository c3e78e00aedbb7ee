"""Read files of llama2.c: a header of seven numbers, then all weights in float32. tokenizer.bin is a separate file."""

import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lmlong.data.tokenizers.huggingface_file import wrapped
from lmlong.data.tokenizers.sentencepiece import SPACE
from lmlong.errors import CheckpointError
from lmlong.interop.gguf_tokenizer import added_token, by_scores
from lmlong.interop.llama import LlamaSource, neighbours_to_halves
from lmlong.interop.llama_config import llama_config

HEADER = struct.Struct("<7i")
SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "vocab_size", "max_position_embeddings"),
)
MAX_SIZE, MAX_LAYERS = 2**24, 10_000
"""Maxima of all sizes and of the layers. The vocabulary size is negative if the output has its own weights."""
ENDS = ("<unk>", "<s>", "</s>")
BEGIN = ENDS.index("<s>")
"""In training this token preceded each text, so the models also write it after a text. They have never seen </s>."""
BYTES = len(ENDS)
"""Number of the first of 256 byte tokens, after ENDS."""


def is_llama2c(path: Path) -> bool:
    """Return whether a file begins with the sizes of a model, which text and archives do not."""
    with path.open("rb") as file:
        return _config(file.read(HEADER.size)) is not None


def open_llama2c(path: Path) -> LlamaSource:
    """Return the model of a file."""
    with path.open("rb") as file:
        sizes = _config(file.read(HEADER.size)) or {}
    weights, expected = _layout(sizes)
    if (size := path.stat().st_size) != expected:
        raise CheckpointError(f"{path}: has {size:,} bytes, not {expected:,}. Fetch it again.")
    config = llama_config(path, sizes)
    shapes = {name: shape for name, (shape, _) in weights.items()}
    numbers = np.memmap(path, np.dtype("<f4"), "r")

    def read(name: str) -> Tensor:
        shape, offset = weights[name]
        values = numbers[offset // 4 : offset // 4 + math.prod(shape)]
        weight = torch.from_numpy(values.astype(np.float32)).reshape(shape)
        return neighbours_to_halves(name, weight, config)

    def tokenizer() -> bytes:
        beside = path.with_name("tokenizer.bin")
        if not beside.is_file():
            raise CheckpointError(f"{beside}: missing. Put the tokenizer of {path.name} there.")
        return _tokenizer(beside, sizes["vocab_size"])

    return LlamaSource(str(path), config, shapes, torch.float32, read, tokenizer)


def _config(header: bytes) -> dict[str, Any] | None:
    """Return the configuration in a header, under transformers' names. None if it is not a valid header."""
    if len(header) < HEADER.size:
        return None
    sizes = dict(zip(SIZES, HEADER.unpack(header), strict=True))
    tied, sizes["vocab_size"] = sizes["vocab_size"] > 0, abs(sizes["vocab_size"])
    heads, shared = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    if not all(0 < size <= MAX_SIZE for size in sizes.values()) or sizes["num_hidden_layers"] > MAX_LAYERS:
        return None
    if sizes["hidden_size"] % heads or heads % shared:
        return None
    return {**sizes, "tie_word_embeddings": tied, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0}


def _layout(config: dict[str, Any]) -> tuple[dict[str, tuple[tuple[int, ...], int]], int]:
    """Return the shape and the offset in bytes of each weight by transformers' name, and the size of the file. The
    weights of one kind are stored together for all layers."""
    width, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head = width // config["num_attention_heads"]
    keys = head * config["num_key_value_heads"]
    layer_weights: tuple[tuple[str, tuple[int, ...]], ...] = (
        ("input_layernorm", (width,)),
        ("self_attn.q_proj", (width, width)),
        ("self_attn.k_proj", (keys, width)),
        ("self_attn.v_proj", (keys, width)),
        ("self_attn.o_proj", (width, width)),
        ("post_attention_layernorm", (width,)),
        ("mlp.gate_proj", (inner, width)),
        ("mlp.down_proj", (width, inner)),
        ("mlp.up_proj", (inner, width)),
    )
    layers = range(config["num_hidden_layers"])
    stored: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens", (vocabulary, width))]
    stored += [(f"model.layers.{layer}.{name}", shape) for name, shape in layer_weights for layer in layers]
    stored += [("model.norm", (width,)), ("cosines and sines", (config["max_position_embeddings"], head))]
    if not config["tie_word_embeddings"]:
        stored.append(("lm_head", (vocabulary, width)))
    weights, offset = {}, HEADER.size
    for name, shape in stored:
        weights[f"{name}.weight"] = shape, offset
        offset += 4 * math.prod(shape)
    del weights["cosines and sines.weight"]  # which the model computes
    return weights, offset


def _tokenizer(path: Path, vocabulary: int) -> bytes:
    """Convert tokenizer.bin: scores and pieces. The first pieces are special tokens and single bytes."""
    data, offset = path.read_bytes(), 4
    pieces: list[str] = []
    scores: list[float] = []
    try:
        while len(pieces) < vocabulary:
            score, length = struct.unpack_from("<fi", data, offset)
            offset += 8 + length
            if length < 0 or offset > len(data):
                raise ValueError("cut short")
            scores.append(score)
            pieces.append(data[offset - length : offset].decode().replace(" ", SPACE))
    except (struct.error, ValueError) as error:
        raise CheckpointError(
            f"{path}: not a tokenizer of {vocabulary:,} tokens ({error}). Use this model's tokenizer."
        ) from None
    pieces[:BYTES] = ENDS
    pieces[BYTES : BYTES + 256] = [f"<0x{byte:02X}>" for byte in range(256)]
    ends = [added_token(token, number) for number, token in enumerate(ENDS)]
    try:
        return wrapped(by_scores(pieces, scores, ends), BEGIN, BEGIN, vocabulary)
    except ValueError as error:
        raise CheckpointError(f"{path}: not a tokenizer of this model ({error}). Use this model's tokenizer.") from None
