"""The tokenizer in a GGUF file, as a tokenizer.json."""

from collections.abc import Sequence
from typing import Any

from lmlong.data.huggingface_tokenizer import BYTE_LEVEL
from lmlong.errors import UsageError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of a token in GGUF."""

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Words, numbers of up to three digits, signs, spaces."""


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
"""How a text is cut before pieces are joined, by the name that llama.cpp gives it."""


def tokenizer_json(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the tokenizer.json of the fields `tokenizer.ggml.*`."""
    tokens, types = fields["tokens"], fields.get("token_type") or []
    vocabulary = {token: number for number, token in enumerate(tokens)}
    kinds = list(zip(tokens, types, strict=False))
    added = [added_token(token, vocabulary[token]) for token, kind in kinds if kind in (CONTROL, UNKNOWN)]
    added += [added_token(token, vocabulary[token], special=False) for token, kind in kinds if kind == USER_DEFINED]
    kind = fields.get("model")
    if kind == "gpt2":
        split = fields.get("pre", "default")
        if split not in SPLITS:
            raise UsageError(f"its tokenizer cuts text by {split!r}, and {', '.join(SPLITS)} are known.")
        model = {"type": "BPE", "vocab": vocabulary, "merges": [merge.split(" ", 1) for merge in fields["merges"]]}
        return whole(model, added, SPLITS[split], byte_level())
    if kind == "llama":
        return by_scores(tokens, fields["scores"], added)
    raise UsageError(f"its tokenizer is of the kind {kind!r}; gpt2 and llama are known.")


def by_scores(tokens: Sequence[str], scores: Sequence[float], added: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the tokenizer.json of pieces of characters, which are joined by falling scores."""
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
    """Return a tokenizer.json of these parts, and none else."""
    nothing = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor"))
    return {
        "version": "1.0",
        **nothing,
        "added_tokens": added,
        "pre_tokenizer": split,
        "decoder": decoder,
        "model": model,
    }
