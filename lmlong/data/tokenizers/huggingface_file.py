"""Read tokenizer.json and the files beside it, and validate them before the library `tokenizers` does.

The library is not hardened against hostile files: it panics on some values and takes exponential time for others.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from lmlong.errors import CheckpointError, UsageError
from lmlong.io.checked import Checked, checked, printable, shown
from lmlong.io.files import parse_json
from lmlong.recipe import bounds

ENDS = {
    "bos": ("<s>", "<|begin_of_text|>", "<|im_start|>", "<|endoftext|>"),
    "eos": ("</s>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>"),
}
"""Common names of the tokens that begin and end a document, used if no file defines them."""

TEMPLATE = "chat_template.jinja"

LOSING = {"Whitespace", "WhitespaceSplit", "BertPreTokenizer", "CharDelimiterSplit"}
"""Pre-tokenizers that drop spaces."""
KEEPING = {"ByteLevel", "Digits", "Metaspace", "Punctuation", "Sequence", "Split", "UnicodeScripts"}
"""Pre-tokenizers that preserve a text."""
MOST_PARTS, DEEPEST = 50, 5
"""The maximum number of pre-tokenizers and their maximum nesting depth."""


def _is_pair(value: Any, second: tuple[type, ...]) -> bool:
    return type(value) is list and len(value) == 2 and type(value[0]) is str and type(value[1]) in second


def _numbered(vocabulary: dict[str, Any]) -> dict[str, Any]:
    """Validate the ids of pieces; a loop, since there are hundreds of thousands."""
    pieces: dict[int, str] = {}
    for piece, token in vocabulary.items():
        if type(token) is not int or not 0 <= token < bounds.VOCABULARY:
            raise ValueError(f"{shown(piece)} has the id {shown(token)}, not a number from 0 to {bounds.VOCABULARY:,}")
        if (other := pieces.setdefault(token, piece)) != piece:
            raise ValueError(f"{shown(other)} and {shown(piece)} have the same id, {token}")
    return vocabulary


def _scored(vocabulary: list[Any]) -> list[Any]:
    for entry in vocabulary:
        if not _is_pair(entry, (int, float)):
            raise ValueError(f"{shown(entry)} is not a pair of a piece and its score")
    return vocabulary


def _joined(merges: list[Any]) -> list[Any]:
    for merge in merges:
        if type(merge) is not str and not _is_pair(merge, (str,)):
            raise ValueError(f"{shown(merge)} is not a pair of pieces")
    return merges


TokenId = Annotated[int, Field(ge=0, lt=bounds.VOCABULARY)]


class AddedToken(Checked):
    id: TokenId
    content: str
    special: bool


class Bpe(Checked):
    vocab: Annotated[dict[str, Any], AfterValidator(_numbered)]
    merges: Annotated[list[Any], AfterValidator(_joined)] = Field(default_factory=list)
    unk_token: str | None = None
    continuing_subword_prefix: Literal["", None] = None  # pieces would not be the text that they stand for
    end_of_word_suffix: Literal["", None] = None


class Unigram(Checked):
    vocab: Annotated[list[Any], AfterValidator(_scored)]


class Specification(Checked):
    """The parts of a tokenizer.json that are validated here."""

    added_tokens: list[AddedToken] | None = None
    model: dict[str, Any]


class WrappedTokenizer(Checked):
    """The content of the file that `wrapped` returns."""

    bos: TokenId
    eos: TokenId
    vocabulary: Annotated[int, Field(gt=0, le=bounds.VOCABULARY)] | None
    chat_template: str | None = None
    tokenizer: dict[str, Any]


class NamedTemplate(Checked):
    name: str
    template: str


class TokenizerConfig(Checked):
    """The fields of a tokenizer_config.json that are used."""

    bos_token: str | dict[str, Any] | None = None
    eos_token: str | dict[str, Any] | None = None
    chat_template: str | list[NamedTemplate] | None = None

    @property
    def template(self) -> str | None:
        """The chat template without tools."""
        if isinstance(self.chat_template, list):
            return next((each.template for each in self.chat_template if each.name == "default"), None)
        return self.chat_template


def wrapped(
    spec: dict[str, Any], bos: int, eos: int, vocabulary: int | None = None, chat_template: str | None = None
) -> bytes:
    """Return the file of a tokenizer: its tokenizer.json, the ids that begin and end a document, the vocabulary size of
    the model, and its chat template."""
    about = {"bos": bos, "eos": eos, "vocabulary": vocabulary, "chat_template": chat_template}
    return json.dumps({"lmlong": "tokenizer", **about, "tokenizer": spec}, ensure_ascii=False).encode()


def unwrapped(file: bytes) -> dict[str, Any]:
    """Return the validated content of a file that `wrapped` returned."""
    saved = _parsed(file)
    checked(WrappedTokenizer, "the saved tokenizer", saved)
    _check(saved["tokenizer"])
    return saved


def read_tokenizer_json(path: Path, vocabulary: int | None = None) -> bytes:
    """Return a tokenizer.json in the form of `wrapped`, with the values of the files beside it."""
    with errors_named(str(path)):
        file = path.read_bytes()
        spec = _parsed(file)
        if "lmlong" in spec:
            return file
        _check(spec)
    beside = path.with_name("tokenizer_config.json")
    with errors_named(str(beside)):
        config = checked(TokenizerConfig, beside.name, _parsed(beside.read_bytes()) if beside.is_file() else {})
    with errors_named(str(path)):
        pieces = pieces_of(spec)
        bos, eos = (_end(ENDS[end], getattr(config, f"{end}_token"), pieces) for end in ENDS)
        if eos is None:
            raise UsageError(f"has no end-of-document token. Set eos_token in {beside.name}.")
        template = _template_file(path.with_name(TEMPLATE)) or config.template
        return wrapped(spec, eos if bos is None else bos, eos, vocabulary, template)


def _template_file(path: Path) -> str | None:
    """Return the chat template that transformers 5 writes to a separate file, if it exists."""
    if not path.is_file():
        return None
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path.name} beside it is not UTF-8 ({error.reason}). Correct that file.") from None


@contextmanager
def errors_named(name: str) -> Iterator[None]:
    """Prefix each error with the name of the file. Every error of the library counts as one of the file: the library
    has no exception type for those, and raises a BaseException if it panics."""
    try:
        yield
    except (UsageError, CheckpointError) as error:
        raise UsageError(printable(f"{name}: {error}")) from None
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        message = f"{name}: not a supported tokenizer.json ({error}). Use another tokenizer."
        raise UsageError(printable(message)) from None


def pieces_of(spec: dict[str, Any]) -> dict[str, int]:
    """Return the ids of all pieces by their text."""
    vocabulary = spec["model"]["vocab"]
    if isinstance(vocabulary, list):
        vocabulary = {piece: token for token, (piece, _) in enumerate(vocabulary)}
    return {**vocabulary, **{token["content"]: token["id"] for token in spec.get("added_tokens") or []}}


def parts_of(part: Any) -> Iterator[dict[str, Any]]:
    """Iterate over a part of a tokenizer.json and the parts nested in it."""
    inside = [(part, 0)]
    while inside:
        part, depth = inside.pop()
        if part is None:
            continue
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise UsageError(f"{shown(part)} is not a valid part of a tokenizer.json. Use another tokenizer.")
        if depth > DEEPEST:
            raise UsageError(f"nests parts more than {DEEPEST} levels deep. Use another tokenizer.")
        yield part
        for key in ("normalizers", "pretokenizers", "decoders"):
            rest = part.get(key) or []
            if not isinstance(rest, list) or len(rest) > MOST_PARTS:
                raise UsageError(f"{key} is not a list of up to {MOST_PARTS} parts. Use another tokenizer.")
            inside.extend((each, depth + 1) for each in reversed(rest))


def _check(spec: dict[str, Any]) -> None:
    """Raise a UsageError for a tokenizer.json that is invalid or unsupported."""
    model = spec.get("model")
    kind = model.get("type") if isinstance(model, dict) else None
    if kind not in ("BPE", "Unigram"):
        raise UsageError(f"unsupported model type {shown(kind)}. Use a BPE or Unigram tokenizer.")
    checked(Specification, "its values", spec)
    checked(Bpe if kind == "BPE" else Unigram, "model", spec["model"])
    list(parts_of(spec.get("decoder")))
    kinds: list[str] = []
    for part in parts_of(spec.get("pre_tokenizer")):
        kinds.append(part["type"])
        if len(kinds) > MOST_PARTS:
            raise UsageError(f"pre_tokenizer has more than {MOST_PARTS} parts. Use another tokenizer.")
    if losing := sorted(LOSING.intersection(kinds)):
        raise UsageError(f"pre_tokenizer {losing[0]} drops spaces. Use another tokenizer.")
    if unknown := [kind for kind in kinds if kind not in KEEPING]:
        raise UsageError(f"unsupported pre_tokenizer {shown(unknown[0])}. Use another tokenizer.")
    if kinds.count("ByteLevel") > 1:  # each doubles the characters of the one before
        raise UsageError("pre_tokenizer ByteLevel occurs more than once. Use another tokenizer.")


def _end(usual: tuple[str, ...], named: str | dict[str, Any] | None, pieces: dict[str, int]) -> int | None:
    """Return the token that begins or ends a document."""
    content = named.get("content") if isinstance(named, dict) else named
    names = [content] if isinstance(content, str) else usual
    return next((pieces[name] for name in names if name in pieces), None)


def _parsed(file: bytes) -> dict[str, Any]:
    try:
        value = parse_json(file)
    except ValueError as error:
        raise UsageError(f"not valid JSON ({error}). Name a tokenizer.json.") from None
    if not isinstance(value, dict):
        raise UsageError("not a tokenizer.json. Name another file.")
    return value
