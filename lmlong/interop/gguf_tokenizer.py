"""Convert the tokenizer of a GGUF file to a tokenizer.json, and back."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from lmlong.data.tokenizers.huggingface import BYTE_LEVEL
from lmlong.data.tokenizers.huggingface_file import pieces_of, wrapped
from lmlong.errors import CheckpointError, UsageError
from lmlong.io.checked import Checked, checked, shown
from lmlong.recipe import bounds

LONGEST_PIECE = 1000
"""Characters of a token. Each token is cut at every position to find the tokens that merge to it."""

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of a token in GGUF."""

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Words, numbers of up to three digits, punctuation, spaces."""


def byte_level(use_regex: bool = True) -> dict[str, Any]:
    return {**BYTE_LEVEL, "use_regex": use_regex}


def sequence(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(parts)}


SPLITS: dict[str, dict[str, Any]] = {
    "default": byte_level(),
    "gpt-2": byte_level(),
    "smollm": sequence({"type": "Digits", "individual_digits": True}, byte_level()),
    "llama-bpe": sequence(
        {"type": "Split", "pattern": {"Regex": LLAMA3}, "behavior": "Isolated", "invert": False}, byte_level(False)
    ),
}
"""Pre-tokenizers by llama.cpp's names."""


class GgufTokenizer(Checked):
    """The fields `tokenizer.*` of a GGUF file."""

    model: str
    tokens: Annotated[list[str], Field(min_length=1, max_length=bounds.VOCABULARY)]
    token_type: list[int] = Field(default_factory=list)
    scores: list[float] = Field(default_factory=list)
    merges: list[str] = Field(default_factory=list)
    pre: str = "default"
    bos_token_id: int | None = None
    eos_token_id: int
    chat_template: str | None = None


def tokenizer_file(path: Path, fields: Mapping[str, Any], vocabulary: int | None) -> bytes:
    """Return the tokenizer file for the fields of a GGUF file."""
    keys = {name: f"tokenizer.ggml.{name}" for name in GgufTokenizer.model_fields}
    keys["chat_template"] = "tokenizer.chat_template"
    about = checked(GgufTokenizer, path, {name: fields[key] for name, key in keys.items() if key in fields}, keys)
    try:
        spec = tokenizer_json(about)
    except ValueError as error:
        raise CheckpointError(f"{path}: its tokenizer is not usable ({error}). Use another model.") from None
    begin = about.eos_token_id if about.bos_token_id is None else about.bos_token_id
    return wrapped(spec, begin, about.eos_token_id, vocabulary, about.chat_template)


def tokenizer_json(about: GgufTokenizer) -> dict[str, Any]:
    """Return the tokenizer.json for the fields of a GGUF file."""
    vocabulary = {token: number for number, token in enumerate(about.tokens)}
    kinds = list(zip(about.tokens, about.token_type, strict=False))
    added = [added_token(token, vocabulary[token]) for token, kind in kinds if kind in (CONTROL, UNKNOWN)]
    added += [added_token(token, vocabulary[token], special=False) for token, kind in kinds if kind == USER_DEFINED]
    if about.model == "gpt2":
        if about.pre not in SPLITS:
            raise ValueError(f"tokenizer.ggml.pre is {shown(about.pre)}; supported are {', '.join(SPLITS)}")
        merges = [merge.split(" ", 1) for merge in about.merges]
        return whole({"type": "BPE", "vocab": vocabulary, "merges": merges}, added, SPLITS[about.pre], byte_level())
    if about.model == "llama":
        return by_scores(about.tokens, about.scores, added)
    raise ValueError(f"tokenizer.ggml.model is {shown(about.model)}; supported are gpt2 and llama")


def by_scores(tokens: Sequence[str], scores: Sequence[float], added: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the tokenizer.json of pieces that are merged in the order of falling scores."""
    if len(tokens) != len(scores):
        raise ValueError(f"{len(tokens):,} tokens and {len(scores):,} scores")
    if (longest := max(map(len, tokens))) > LONGEST_PIECE:
        raise ValueError(f"a token of {longest:,} characters")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = [
        (scores[number], vocabulary[token[:cut]], vocabulary[token[cut:]], token[:cut], token[cut:])
        for token, number in vocabulary.items()
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    merges.sort(key=lambda merge: (-merge[0], merge[1], merge[2]))
    joined = [[left, right] for *_, left, right in merges]
    model = {"type": "BPE", "vocab": vocabulary, "merges": joined, "byte_fallback": True, "fuse_unk": True}
    return whole({**model, "unk_token": tokens[0]}, added, None, None)


def added_token(token: str, number: int, special: bool = True) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": token, **flags, "special": special}


def whole(model: dict[str, Any], added: list[dict[str, Any]], split: Any, decoder: Any) -> dict[str, Any]:
    """Return a tokenizer.json with only these parts."""
    nothing = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor"))
    return {
        "version": "1.0",
        **nothing,
        "added_tokens": added,
        "pre_tokenizer": split,
        "decoder": decoder,
        "model": model,
    }


def gguf_tokenizer(
    spec: Mapping[str, Any], bos: int, eos: int, vocabulary: int, chat_template: str | None
) -> dict[str, Any]:
    """Return the fields of a GGUF file for a tokenizer.json that changes no text. Raise UsageError if llama.cpp has no
    such tokenizer."""
    model, added = spec["model"], spec["added_tokens"]
    if model["type"] != "BPE":
        raise UsageError(f"its tokenizer is of type {model['type']}; only BPE is exported to GGUF. Use hf.")
    pieces = {number: piece for piece, number in pieces_of(dict(spec)).items()}
    tokens = [pieces.get(number, f"[unused {number}]") for number in range(vocabulary)]
    kinds = [NORMAL if number in pieces else UNUSED for number in range(vocabulary)]
    for token in added:
        kinds[token["id"]] = CONTROL if token["special"] else USER_DEFINED
    merges = [merge.split(" ", 1) if isinstance(merge, str) else list(merge) for merge in model["merges"]]
    of_model = _of_bytes(spec, merges) if spec["normalizer"] is None else _of_pieces(spec, merges, tokens, kinds)
    fields = {
        **{"tokens": tokens, "token_type": kinds, **of_model, "bos_token_id": bos, "eos_token_id": eos},
        **{"add_bos_token": True, "add_space_prefix": False},
    }
    template = {} if chat_template is None else {"tokenizer.chat_template": chat_template}
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items()} | template


def _of_bytes(spec: Mapping[str, Any], merges: list[list[str]]) -> dict[str, Any]:
    """Return the fields of pieces of bytes."""
    names = [name for name, split in SPLITS.items() if split == spec["pre_tokenizer"]]
    if not names:
        raise UsageError("llama.cpp does not split words as its tokenizer does. Use hf.")
    return {"model": "gpt2", "pre": names[-1], "merges": [" ".join(merge) for merge in merges]}


def _of_pieces(spec: Mapping[str, Any], merges: list[list[str]], tokens: list[str], kinds: list[int]) -> dict[str, Any]:
    """Return the fields of pieces of characters, which are merged in the order of falling scores."""
    scores = dict.fromkeys(tokens, float(-len(merges) - 1))
    for rank, merge in reversed(list(enumerate(merges))):
        scores["".join(merge)] = float(-rank)
    if by_scores(tokens, list(scores.values()), [])["model"]["merges"] != merges or spec["pre_tokenizer"]:
        raise UsageError("llama.cpp does not merge pieces as its tokenizer does. Use hf.")
    unknown = spec["model"].get("unk_token")
    for number, token in enumerate(tokens):
        if token == unknown:
            kinds[number] = UNKNOWN
        elif re.fullmatch("<0x[0-9A-F]{2}>", token):
            kinds[number] = BYTE
    return {"model": "llama", "scores": [scores[token] for token in tokens]}
