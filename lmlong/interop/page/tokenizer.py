"""What a page knows of a tokenizer (tokenizer.js)."""

import re
from collections.abc import Iterator
from typing import Any

from lmlong.data.tokenizers.base import ByteTokenizer, Tokenizer
from lmlong.data.tokenizers.huggingface import BYTE, HuggingFaceTokenizer
from lmlong.data.tokenizers.huggingface_file import parts_of, pieces_of
from lmlong.data.tokenizers.sentencepiece import UNSAFE, SentencePieceTokenizer
from lmlong.errors import UsageError

WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The pattern of ByteLevel."""

WHITE = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
"""White space in Unicode. JavaScript's differs."""

NOTHING = "([])"
"""A pattern of JavaScript that matches nothing."""

MORE_CASES = {"s": "\u017f", "k": "\u212a"}
"""Letters that match another without regard to case, beside its capital."""


def page_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return what a page needs of a tokenizer: the bytes of all tokens as characters, the tokens that text is merged
    into and the merges, by rank: pairs of tokens, or if these are `byResult`, the merged ones."""
    table = [tokenizer.decode_bytes([token]).decode("latin-1") for token in range(tokenizer.vocabulary)]
    ends = {"bos": tokenizer.bos, "eos": tokenizer.eos, "table": table, "patterns": [], "added": NOTHING}
    if isinstance(tokenizer, ByteTokenizer):
        everything = list(range(256))
        return ends | {"ofBytes": True, "bytes": everything, "pieces": everything, "merges": [], "unsafe": NOTHING}
    if isinstance(tokenizer, SentencePieceTokenizer):
        return ends | _of_sentencepiece(tokenizer)
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return ends | _of_huggingface(tokenizer)
    raise UsageError("a page has no tokenizer of characters. Use --to hf.")


def _of_sentencepiece(tokenizer: SentencePieceTokenizer) -> dict[str, Any]:
    processor = tokenizer.processor
    pieces = [
        token
        for token in range(tokenizer.vocabulary)
        if not (processor.is_control(token) or processor.is_unknown(token) or processor.is_byte(token))
    ]
    scores = [processor.get_score(token) for token in pieces]
    if any(score > 0 or score != int(score) for score in scores):
        raise UsageError("a page has no unigram tokenizer, only BPE. Use --to hf.")
    merges = [[token] for _, token in sorted(zip(scores, pieces, strict=True), key=lambda each: -each[0])]
    bytes_ = [processor.piece_to_id(f"<0x{byte:02X}>") for byte in range(256)]
    return {"byResult": True, "bytes": bytes_, "pieces": pieces, "merges": merges, "unsafe": UNSAFE.pattern}


def _of_huggingface(tokenizer: HuggingFaceTokenizer) -> dict[str, Any]:
    spec = tokenizer.specification
    model, added = spec["model"], {token["content"]: token["id"] for token in spec["added_tokens"]}
    of_bytes = spec["normalizer"] is None
    if model["type"] != "BPE" or tokenizer.lost or any(model.get(key) for key in AFFIXES):
        raise UsageError("a page has only BPE tokenizers with a token for each byte, without affixes. Use --to hf.")
    ids = pieces_of(spec)
    hidden = {*added.values(), *tokenizer.special.values()}
    pieces = [
        token
        for piece, token in ids.items()
        if token not in hidden and (of_bytes or not re.fullmatch(BYTE, piece)) and piece != model.get("unk_token")
    ]
    pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
    return {
        "ofBytes": of_bytes,
        "ignoreMerges": bool(model.get("ignore_merges")),
        "bytes": [tokenizer.byte_tokens.get(byte) for byte in range(256)],
        "pieces": pieces,
        "merges": [[ids[left], ids[right]] for left, right in pairs],
        "patterns": [pattern for part in parts_of(spec["pre_tokenizer"]) for pattern in _patterns(part)],
        "unsafe": tokenizer.unsafe.pattern,
        "addedIds": added,
        "added": f"({'|'.join(map(_literal, sorted(added, key=len, reverse=True)))})" if added else NOTHING,
    }


def _literal(text: str) -> str:
    """Return a pattern of JavaScript for a text."""
    return re.sub(r"[\^$.*+?()[\]{}|/\\]", r"\\\g<0>", text)


AFFIXES = ("continuing_subword_prefix", "end_of_word_suffix")


def _patterns(part: dict[str, Any]) -> Iterator[str]:
    """Yield the patterns by which a pre-tokenizer cuts a text: around each match."""
    kind = part["type"]
    if kind == "ByteLevel":
        if part.get("use_regex", True):
            yield javascript(WORDS)
    elif kind == "Digits":
        yield r"\p{N}" if part.get("individual_digits") else r"\p{N}+"
    elif kind == "Split" and part["behavior"] == "Isolated" and not part.get("invert") and "Regex" in part["pattern"]:
        yield javascript(part["pattern"]["Regex"])
    elif kind != "Sequence":
        raise UsageError(f"a page has no pre_tokenizer {kind} such as this tokenizer's. Use --to hf.")


def javascript(pattern: str) -> str:
    """Return a regular expression in the form of JavaScript that has one meaning in all browsers."""
    pattern = re.sub(r"\(\?i:((?:[^()\\]|\\.)*)\)", lambda match: f"(?:{_any_case(match[1])})", pattern)
    if unknown := re.search(r"\(\?(?![:!=])|(?<!\\)[*+?]\+|\{[\d,]+\}\+", pattern):
        raise UsageError(f"a page has no {unknown[0]} in a pattern of its tokenizer. Use --to hf.")
    parts, inside = re.findall(r"\\.|.", pattern, re.DOTALL), False
    for number, each in enumerate(parts):
        if each in "[]":
            inside = each == "["
        elif each == r"\s":
            parts[number] = WHITE if inside else f"[{WHITE}]"
        elif each == r"\S" and not inside:
            parts[number] = f"[^{WHITE}]"
    return "".join(parts)


def _any_case(pattern: str) -> str:
    """Return a pattern without special letters that matches letters of any case."""

    def either(match: re.Match[str]) -> str:
        letter = match[0].lower()
        return f"[{letter}{letter.upper()}{MORE_CASES.get(letter, '')}]"

    return re.sub(r"(?<!\\)[a-zA-Z]", either, pattern)
