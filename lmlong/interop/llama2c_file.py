"""Read files of llama2.c: a header of seven numbers, then all weights in float32. tokenizer.bin is a separate file."""

import math
import struct
from collections.abc import Iterator
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
MAX_SIZE = 2**24
"""Maximum of a size. The vocabulary size is negative if the output has its own weights."""
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
    if (size := path.stat().st_size) != (expected := _size(sizes)):
        raise CheckpointError(f"{path}: has {size:,} bytes, not {expected:,}. Fetch it again.")
    config = llama_config(path, sizes)
    offsets, shapes = {}, {}
    for name, shape, offset in _layout(sizes):
        offsets[name], shapes[name] = offset, shape
    numbers = np.memmap(path, np.dtype("<f4"), "r")

    def read(name: str) -> Tensor:
        begin = offsets[name] // 4
        values = numbers[begin : begin + math.prod(shapes[name])]
        weight = torch.from_numpy(values.astype(np.float32)).reshape(shapes[name])
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
    if not all(0 < size <= MAX_SIZE for size in sizes.values()) or sizes["hidden_size"] % heads or heads % shared:
        return None
    return {**sizes, "tie_word_embeddings": tied, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0}


def _layout(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """Yield transformers' name, the shape and the offset in bytes of each weight. The weights of one kind are stored
    together for all layers."""
    width, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head = width // config["num_attention_heads"]
    keys = head * config["num_key_value_heads"]
    layers = range(config["num_hidden_layers"])
    each: tuple[tuple[str, tuple[int, ...]], ...] = (
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
    order: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens", (vocabulary, width))]
    order += [(f"model.layers.{layer}.{name}", shape) for name, shape in each for layer in layers]
    order += [("model.norm", (width,))]
    offset = HEADER.size
    for name, shape in order:
        yield f"{name}.weight", shape, offset
        offset += 4 * math.prod(shape)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocabulary, width), offset + _table(config)


def _table(config: dict[str, Any]) -> int:
    """Return the size in bytes of the table of cosines and sines, stored before the output weights and not used."""
    return 4 * config["max_position_embeddings"] * (config["hidden_size"] // config["num_attention_heads"])


def _size(config: dict[str, Any]) -> int:
    """Return the size of the file in bytes."""
    width, vocabulary = config["hidden_size"], config["vocab_size"]
    keys = width // config["num_attention_heads"] * config["num_key_value_heads"]
    layer = 2 * width + 2 * width * width + 2 * width * keys + 3 * width * config["intermediate_size"]
    embeddings = vocabulary * width * (1 if config["tie_word_embeddings"] else 2)
    return HEADER.size + 4 * (embeddings + config["num_hidden_layers"] * layer + width) + _table(config)


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
