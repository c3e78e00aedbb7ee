"""Random tokenizers: trained on drawn texts with drawn options, other models, and damaged files; and what must hold of
each that is not refused."""

import io
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import tokenizers as huggingface
from crafted import changed, changed_bytes
from sentencepiece import SentencePieceTrainer
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from lmlong import recipe
from lmlong.data.tokenizers import load_tokenizer, train_tokenizer
from lmlong.data.tokenizers.base import Tokenizer, parts
from lmlong.data.tokenizers.boundaries import Cover, settled
from lmlong.data.tokenizers.characters import CharacterTokenizer
from lmlong.errors import UsageError
from lmlong.inference.unread import Encoding, UnreadText

ALPHABETS = (
    *("etaoin shrdlu", "ab", "  \n\tab", "0123456789-+=. ", "éàüßñ ç", "中文字符。", "😀👍🏽👨‍👩‍👧 ", "ابجد هوز"),
    *("e\u0301o\u0308n\u0303 ", "▁▅ a", "\0\x01\x7f a", "\u2028\u2029\x85\r\n", "\ud800\udc00\udfffa"),
    *("\ufeff\ufffd\ufb01\uff21 ", "<s>/unk0x41 "),
)
WORDS = [
    *("def", "return", "self", "the", "of", "and", "to", "in", "was", "he", "ing", "tion"),
    *("<s>", "</s>", "<0x41>", "http://", "---", "====", "the", "the"),
]


def draw_text(draw: random.Random, size: int) -> str:
    """Characters of a few alphabets, words and runs."""
    alphabets, text = draw.choices(ALPHABETS, k=draw.randint(1, 3)), ""
    while len(text) < size:
        kind = draw.random()
        if kind < 0.5:
            text += "".join(draw.choices(draw.choice(alphabets), k=draw.randint(1, 12)))
        elif kind < 0.9:
            text += draw.choice(WORDS) + draw.choice([" ", " ", "", "\n"])
        else:
            text += draw.choice(draw.choice(alphabets)) * draw.randint(2, 60)
    return text[:size]


def draw_file(draw: random.Random) -> bytes | recipe.Tokenizer:
    """Draw a file, whole or damaged, or options to train by."""
    kind = draw.random()
    if draw.random() < 0.1:
        file = CharacterTokenizer("".join(sorted(set(draw_text(draw, 100)))), draw.choice(["error", "replace"])).file
        return changed_bytes(draw, file) if kind < 0.5 else file
    if kind < 0.4:
        algorithm: Any = draw.choice(["bpe", "bpe", "unigram"])
        return recipe.Tokenizer(vocabulary=draw.choice([300, 350, 500, 1000]), algorithm=algorithm)
    if kind < 0.45:
        return bytes(draw.randrange(256) for _ in range(draw.choice([0, 1, 10, 1000])))
    if draw.random() < 0.5:
        spec = tokenizer_json(draw)
        if kind < 0.7:
            spec = changed(draw, spec)
        file = json.dumps(spec).encode()
        return changed_bytes(draw, file) if 0.7 <= kind < 0.75 else file
    file = other_model(draw)
    return changed_bytes(draw, file) if kind < 0.8 else file


def tokenizer_json(draw: random.Random) -> dict[str, Any]:
    """A tokenizer.json of another program: of bytes, or of characters with tokens for single bytes."""
    of_bytes, unigram = draw.random() < 0.5, draw.random() < 0.3
    text = draw_text(draw, 4000).encode("utf-8", "replace").decode()
    ends = ["<unk>", "<s>", "</s>", *draw.choice([[], ["<sep>"], ["<sep>"], ["<sep>"], ["e"]])]
    every = pre_tokenizers.ByteLevel.alphabet() if of_bytes else [f"<0x{byte:02X}>" for byte in range(256)]
    options: dict[str, Any] = {"vocab_size": draw.choice([400, 600]), "show_progress": False}
    if unigram:
        tokenizer = huggingface.Tokenizer(models.Unigram())
        trainer: Any = trainers.UnigramTrainer(special_tokens=ends, unk_token="<unk>", **options)
    else:
        tokenizer = huggingface.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=not of_bytes))
        trainer = trainers.BpeTrainer(special_tokens=ends, **options)
    splits: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if draw.random() < 0.3 else []
    if draw.random() < 0.3:
        splits.append(
            pre_tokenizers.Split(huggingface.Regex(r"\s+|\w+"), draw.choice(["isolated", "merged_with_next"]))
        )
    if of_bytes:
        splits.append(pre_tokenizers.ByteLevel(add_prefix_space=draw.random() < 0.5, use_regex=draw.random() < 0.5))
    else:
        splits.append(pre_tokenizers.Metaspace(prepend_scheme=draw.choice(["always", "first", "never"])))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    tokenizer.decoder = decoders.ByteLevel() if of_bytes else decoders.ByteFallback()
    if draw.random() < 0.3:
        tokenizer.normalizer = draw.choice([normalizers.NFKC(), normalizers.Lowercase(), normalizers.Strip()])
    tokenizer.train_from_iterator(text.splitlines(), trainer)
    spec: dict[str, Any] = json.loads(tokenizer.to_str())
    pieces = spec["model"]["vocab"]
    known = {piece for piece, _ in pieces} if unigram else set(pieces)
    for piece in (piece for piece in every if piece not in known and draw.random() < 0.9999):
        if unigram:
            pieces.append([piece, -20.0])
        else:
            pieces[piece] = len(pieces)
    if unigram:
        spec["model"]["byte_fallback"] = not of_bytes
    tokenizer = huggingface.Tokenizer.from_str(json.dumps(spec))
    if draw.random() < 0.3:
        lstrip, word = draw.random() < 0.5, draw.random() < 0.5
        added = huggingface.AddedToken(draw.choice(["of ", "  ", "ab"]), lstrip=lstrip, single_word=word)
        tokenizer.add_tokens([added])
    whole: dict[str, Any] = json.loads(tokenizer.to_str())
    return whole


def other_model(draw: random.Random) -> bytes:
    """A sentencepiece model with other options."""
    options: dict[str, Any] = {
        "model_type": draw.choice(["bpe", "bpe", "unigram", "unigram", "char", "word"]),
        "vocab_size": draw.choice([400, 600]),
        "byte_fallback": draw.random() < 0.9,
        "add_dummy_prefix": draw.random() < 0.5,
        "split_digits": draw.random() < 0.3,
        "split_by_whitespace": draw.random() < 0.7,
        "treat_whitespace_as_suffix": draw.random() < 0.2,
        "allow_whitespace_only_pieces": draw.random() < 0.3,
        "normalization_rule_name": draw.choice(["identity", "nmt_nfkc", "nmt_nfkc_cf"]),
        "user_defined_symbols": draw.choice([[], ["<sep>", "the "], ["ab", "bc", "  "], ["\n"]]),
        "control_symbols": draw.choice([[], ["<ctl>"], ["e"]]),
        "bos_id": draw.choice([1, 1, 1, -1]),
    }
    lines = [line for line in draw_text(draw, 6000).replace("\0", "").split("\n") if line.strip()] or ["a b c"]
    lines = [line.encode("utf-8", "replace").decode() for line in lines]
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, hard_vocab_limit=False, minloglevel=3, **options
    )
    return model.getvalue()


def fuzz(number: int) -> tuple[str, list[str]]:
    """Return what became of the tokenizer of a number, and what is wrong with it."""
    draw = random.Random(number)
    drawn = draw_file(draw)
    try:
        if isinstance(drawn, bytes):
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "drawn.model"
                path.write_bytes(drawn)
                tokenizer = load_tokenizer(path)
        else:
            tokenizer = train_tokenizer([draw_text(draw, draw.choice([50, 1000, 8000]))], drawn)
    except UsageError as error:
        said = str(error)
        return "refused", [] if said.endswith(".") and ":" in said else [f"does not say what to do: {said}"]
    what = "trained" if not isinstance(drawn, bytes) else "loaded"
    texts = [draw_text(draw, draw.choice([0, 1, 30, 300])) for _ in range(5)]
    if isinstance(tokenizer, CharacterTokenizer) and tokenizer.unknown == "error":
        texts = ["".join(one for one in text if one in tokenizer.alphabet) for text in texts]
    if isinstance(drawn, bytes) and b'"Unigram"' in drawn:
        # names of bytes are encoded by themselves: no tokens cover them
        texts = [text.replace("<0x41>", "") for text in texts]
    return what, [wrong for text in texts for wrong in examine(draw, tokenizer, text)]


def examine(draw: random.Random, tokenizer: Tokenizer, text: str) -> list[str]:
    """Return what is wrong with the tokens of a text, and with those of its parts."""
    text = tokenizer.representable(text)
    tokens, wrong = tokenizer.encode(text), []
    data = text.encode("utf-8", "surrogatepass")
    cuts = sorted(draw.randint(0, len(text)) for _ in range(3))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    stream = tokenizer.stream()
    some = [draw.randrange(tokenizer.vocabulary) for _ in range(20)]
    other = tokenizer.stream()
    checks = {
        "text is lost": tokenizer.decode(tokens) == text,
        "bytes are lost": tokenizer.decode_bytes(tokens) == data,
        "bytes are counted wrongly": int(tokenizer.token_bytes[tokens].sum()) == len(data),
        "bos or eos in a text": not {tokenizer.bos, tokenizer.eos} & set(tokens),
        "pieces differ": [token for part in parts(pieces) for token in tokenizer.encode_part(part)] == tokens,
        "the stream differs": "".join(map(stream.feed, tokens)) + stream.finish() == text,
        "the stream of any tokens differs": "".join(map(other.feed, some)) + other.finish() == tokenizer.decode(some),
        "a continued text has other tokens": read_in_parts(tokenizer, pieces) == tokens,
        "a cover is missing": all(is_covered(tokenizer, text[:cut], text[cut:]) for cut in cuts),
    }
    wrong += [f"{what}: {text!r}" for what, right in checks.items() if not right]
    return wrong


def read_in_parts(tokenizer: Tokenizer, pieces: list[str]) -> list[int]:
    """Return the tokens of a text that a session reads piece by piece, each after the last."""
    tokens, unread = [], UnreadText()
    for piece in [*pieces, ""]:
        encoding = Encoding(tokenizer, unread, [piece], heal=True)
        tokens += [token for part in encoding for token in part]
        unread = encoding.unread
    return tokens + [token for part in Encoding(tokenizer, unread, [], heal=False) for token in part]


def is_covered(tokenizer: Tokenizer, text: str, following: str) -> bool:
    """Return whether the tokens of a continued text begin as one of its covers."""
    covers = tokenizer.boundaries.covers(text)
    stays, begin = covers[0].tokens[: settled(covers)], text.encode("utf-8", "surrogatepass")
    whole, inside, size = tokenizer.encode(text + following), [], 0
    for token in whole:
        if size + int(tokenizer.token_bytes[token]) > len(begin):
            break
        inside.append(token)
        size += int(tokenizer.token_bytes[token])
    return whole[: len(stays)] == stays and Cover(inside, begin[size:]) in covers
