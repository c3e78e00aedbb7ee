"""A tiny random Llama, its logits by the formulas in float64, and its files in the formats of other programs."""

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import torch
from models import predict
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from lmlong.model.language_model import LanguageModel

TEXT = "The quick brown fox jumps over the lazy dog. " * 20 + "Two wizards quickly jump past five boxing ducks.\n" * 20

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-3,
    "rope_theta": 500.0,
    "max_position_embeddings": 64,
    "vocab_size": 300,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 40,
}


def weights(config: dict[str, Any], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return random weights by the names of transformers."""
    width, inner, vocabulary = (config[key] for key in ("hidden_size", "intermediate_size", "vocab_size"))
    keys = width // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes = {"model.embed_tokens": (vocabulary, width), "model.norm": (width,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head"] = (vocabulary, width)
    for layer in range(config["num_hidden_layers"]):
        inside = {
            **dict.fromkeys(["input_layernorm", "post_attention_layernorm"], (width,)),
            **dict.fromkeys(["self_attn.q_proj", "self_attn.o_proj"], (width, width)),
            **dict.fromkeys(["self_attn.k_proj", "self_attn.v_proj"], (keys, width)),
            **dict.fromkeys(["mlp.gate_proj", "mlp.up_proj"], (inner, width)),
            "mlp.down_proj": (width, inner),
        }
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in inside.items()}
    draw = torch.Generator().manual_seed(0)
    return {f"{name}.weight": (torch.randn(shape, generator=draw) * 0.4).to(dtype) for name, shape in shapes.items()}


def logits(config: dict[str, Any], given: dict[str, Tensor], tokens: list[int]) -> Tensor:
    """Return the logits of a text by the formulas, a head at a time."""
    w = {name: weight.double() for name, weight in given.items()}
    x = w["model.embed_tokens.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):
        own = {name.split(".", 3)[3]: weight for name, weight in w.items() if name.startswith(f"model.layers.{layer}.")}
        x = x + _attention(config, own, _norm(config, x, own["input_layernorm.weight"]))
        h = _norm(config, x, own["post_attention_layernorm.weight"])
        gate = h @ own["mlp.gate_proj.weight"].T
        x = x + (gate * torch.sigmoid(gate) * (h @ own["mlp.up_proj.weight"].T)) @ own["mlp.down_proj.weight"].T
    return _norm(config, x, w["model.norm.weight"]) @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T


def read_both_ways(model: LanguageModel, tokens: list[int]) -> tuple[Tensor, Tensor]:
    """Return the logits of a model after each token, read at once and token by token."""
    with torch.inference_mode():
        at_once, _ = predict(model, torch.tensor([tokens]))
        state, steps = model.init_state(1), []
        for token in tokens:
            one, state = model.step(torch.tensor([token]), state)
            steps.append(one[0])
    return at_once[0], torch.stack(steps)


def _norm(config: dict[str, Any], x: Tensor, gain: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + config["rms_norm_eps"]).sqrt() * gain


def _attention(config: dict[str, Any], w: dict[str, Tensor], h: Tensor) -> Tensor:
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    size = h.shape[1] // heads
    q, k, v = (h @ w[f"self_attn.{name}_proj.weight"].T for name in "qkv")
    out = []
    for head in range(heads):
        shared = head * groups // heads
        queries = _turned(config, q[:, head * size : (head + 1) * size])
        keys = _turned(config, k[:, shared * size : (shared + 1) * size])
        scores = queries @ keys.T / math.sqrt(size)
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
        out.append(scores.softmax(-1) @ v[:, shared * size : (shared + 1) * size])
    return torch.cat(out, 1) @ w["self_attn.o_proj.weight"].T


def _turned(config: dict[str, Any], x: Tensor) -> Tensor:
    half, turned = x.shape[1] // 2, x.clone()
    for pair in range(half):
        frequency = config["rope_theta"] ** (-2 * pair / x.shape[1])
        if scaling := config.get("rope_scaling"):
            long = scaling["original_max_position_embeddings"]
            wave = 2 * math.pi / frequency
            if wave > long / scaling["low_freq_factor"]:
                frequency /= scaling["factor"]
            elif wave > long / scaling["high_freq_factor"]:
                span = scaling["high_freq_factor"] - scaling["low_freq_factor"]
                smooth = (long / wave - scaling["low_freq_factor"]) / span
                frequency = (1 - smooth) * frequency / scaling["factor"] + smooth * frequency
        angles = torch.arange(len(x), dtype=x.dtype) * frequency
        left, right = x[:, pair], x[:, half + pair]
        turned[:, pair] = left * angles.cos() - right * angles.sin()
        turned[:, half + pair] = right * angles.cos() + left * angles.sin()
    return turned


@cache
def byte_level() -> Tokenizer:
    """Return a tokenizer of bytes written as characters, with special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


CHAT = (
    "{{ bos_token }}{% for message in messages %}\n"
    "    {% if message.role not in ('system', 'user', 'assistant') %}{{ raise_exception('who?') }}{% endif %}\n"
    "[{{ message.role }}]{{ message.content }}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def write_folder(
    folder: Path, config: dict[str, Any], given: dict[str, Tensor], files: int = 1, template: str = CHAT
) -> Path:
    """Write a folder as transformers does."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    byte_level().save(str(folder / "tokenizer.json"))
    ends = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(ends))
    if files == 1:
        save_file(given, folder / "model.safetensors")
        return folder
    names = sorted(given)
    where = {name: f"model-{1 + number % files:05d}-of-{files:05d}.safetensors" for number, name in enumerate(names)}
    for file in set(where.values()):
        save_file({name: given[name] for name in names if where[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"\u2581thequick", "\u2581t", "he"]
PIECES += ["\u2581the", "qu"]
"""What a tokenizer of characters joins a text of; the token that ends it has number 2."""


def neighbours(config: dict[str, Any], name: str, weight: Tensor) -> Tensor:
    """Return a weight with queries and keys in the order where neighbours are rotated, as llama.cpp does."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
    if not heads:
        return weight
    return weight.unflatten(0, (config[heads], 2, -1)).transpose(1, 2).reshape(weight.shape)


def add_pieces(writer: gguf.GGUFWriter, vocabulary: int) -> None:
    """Add a tokenizer of characters."""
    pieces = [*PIECES, *(f"[{number}]" for number in range(vocabulary - len(PIECES)))]
    kinds = [2, 3, 3, *[6] * 256]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(pieces)
    writer.add_token_scores([-float(number) for number in range(len(pieces))])
    writer.add_token_types(kinds + [1] * (len(pieces) - len(kinds)))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def write_gguf(
    path: Path, config: dict[str, Any], given: dict[str, Tensor], kind: type[gguf.GGUFWriter] = gguf.GGUFWriter
) -> Path:
    """Write a GGUF file as llama.cpp's converter does: queries and keys in the order of neighbouring pairs."""
    writer = kind(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    add_pieces(writer, config["vocab_size"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, weight in given.items():
        tensor = neighbours(config, name, weight).float().numpy().copy()
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
