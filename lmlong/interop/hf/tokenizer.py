"""Export a tokenizer of lmlong as a tokenizer.json of the library `tokenizers`, with transformers' configuration."""

import json
from typing import Any

from lmlong.data.tokenizers.base import ByteTokenizer, Tokenizer
from lmlong.data.tokenizers.characters import REPLACEMENT, CharacterTokenizer
from lmlong.data.tokenizers.huggingface import BYTE_OF, HuggingFaceTokenizer, lossless
from lmlong.data.tokenizers.sentencepiece import SentencePieceTokenizer
from lmlong.interop.gguf_tokenizer import added_token, by_scores, byte_level, whole

BEGIN, END = "<s>", "</s>"
UNBOUNDED = 10**30
"""The `model_max_length` of transformers that means no limit."""
NO_TOKEN = "no such character"
"""The unknown token of tokenizers without one. It is not in the vocabulary, so the library raises an error if it is
needed."""
NEVER = -1e4
"""Score of special tokens and byte tokens in a unigram model. Their names in a text, such as <0x41>, are plain text."""


def tokenizer_files(tokenizer: Tokenizer, longest: int) -> dict[str, str]:
    """Return the files by name. Encoding prepends the token that begins a document unless `add_special_tokens=False`.
    The name of a special token in a text is plain text."""
    spec = specification(tokenizer)
    names = {token["id"]: token["content"] for token in spec["added_tokens"]}
    bos, eos = names[tokenizer.bos], names[tokenizer.eos]
    begin = {"SpecialToken": {"id": bos, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    spec["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin, first],
        "pair": [begin, first, second],
        "special_tokens": {bos: {"id": bos, "ids": [tokenizer.bos], "tokens": [bos]}},
    }
    config = {
        "tokenizer_class": "TokenizersBackend",
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": eos,
        "padding_side": "left",
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": longest,
        **({"chat_template": tokenizer.chat_template} if tokenizer.chat_template else {}),
    }
    return {
        "tokenizer.json": json.dumps(spec, ensure_ascii=False),
        "tokenizer_config.json": json.dumps(config, ensure_ascii=False, indent=2),
    }


def specification(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return a tokenizer.json that encodes as a tokenizer does."""
    return _of_characters(tokenizer) if isinstance(tokenizer, CharacterTokenizer) else lossless(_spec(tokenizer))


def _spec(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return a tokenizer.json with the pieces of a tokenizer."""
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return json.loads(tokenizer.file)["tokenizer"]
    if isinstance(tokenizer, ByteTokenizer):
        added = [added_token(BEGIN, tokenizer.bos), added_token(END, tokenizer.eos)]
        vocabulary = BYTE_OF | {token["content"]: token["id"] for token in added}
        return whole({"type": "BPE", "vocab": vocabulary, "merges": []}, added, byte_level(False), None)
    assert isinstance(tokenizer, SentencePieceTokenizer)
    return _of_sentencepiece(tokenizer.processor)


def _of_characters(tokenizer: CharacterTokenizer) -> dict[str, Any]:
    """Return a tokenizer.json in which each character is a word. A character missing from the alphabet is an error, as
    in lmlong, unless it is replaced."""
    added = [added_token(BEGIN, tokenizer.bos), added_token(END, tokenizer.eos)]
    vocabulary = {character: number for number, character in enumerate(tokenizer.characters)}
    unknown = REPLACEMENT if tokenizer.replacement is not None else NO_TOKEN
    model = {"type": "WordLevel", "vocab": vocabulary | {BEGIN: tokenizer.bos, END: tokenizer.eos}}
    split = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}
    return whole({**model, "unk_token": unknown}, added, split, {"type": "Fuse"})


def _of_sentencepiece(processor: Any) -> dict[str, Any]:
    numbers = range(processor.vocab_size())
    pieces = [processor.id_to_piece(number) for number in numbers]
    scores = [processor.get_score(number) for number in numbers]
    special = [number for number in numbers if processor.is_control(number) or processor.is_unknown(number)]
    added = [added_token(pieces[number], number) for number in special]
    if all(score <= 0 and score == int(score) for score in scores):  # scores of bpe are negated merge numbers
        return by_scores(pieces, scores, added)
    never_matched = {*special, *(number for number in numbers if processor.is_byte(number))}
    scores = [NEVER if number in never_matched else scores[number] for number in numbers]
    vocabulary = [[piece, score] for piece, score in zip(pieces, scores, strict=True)]
    model = {"type": "Unigram", "unk_id": processor.unk_id(), "vocab": vocabulary, "byte_fallback": True}
    return whole(model, added, None, None)
