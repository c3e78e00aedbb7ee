"""Options of the text: its sources, its tokenizer, and how it is cut."""

from collections import Counter
from collections.abc import Iterator
from encodings import aliases
from typing import Annotated, Literal

from pydantic import Field
from pydantic_core import PydanticCustomError

from lmlong.errors import nearest
from lmlong.recipe import bounds
from lmlong.recipe.option_types import COMMA_LIST, LENGTH
from lmlong.recipe.section import Options, mistake


class PythonStdlib(Options):
    """The standard library of the running Python, without tests and encodings: a corpus that every machine has."""

    kind: Literal["python-stdlib"]
    weight: float = Field(default=1.0, gt=0, le=bounds.FACTOR)
    """Share of the training tokens, relative to the other sources."""


class Files(Options):
    """Files on disk: plain text, .epub, .docx, .pdf and .html as one document a file; .jsonl, .ndjson, .json, .csv,
    .tsv, .parquet and .arrow, and FASTA, as one document a record; each text in a ZIP or TAR archive."""

    kind: Literal["files"]
    paths: Annotated[list[str], COMMA_LIST] = Field(min_length=1)
    """Files, folders or globs (** crosses folders); relative ones start at the current folder. .gz, .zst, .bz2 and .xz
    too. One text with commas between them is such a list: paths=a.txt,b.txt. Of a folder .txt, .md, .py, .jsonl,
    .ndjson, .parquet, .arrow, FASTA, documents and archives are read, and all else is reported as left out. - is
    standard input, and -.jsonl or another suffix what is read as such a file; a copy is kept in the cache."""
    column: str = "text"
    """Field of a record that holds the text."""
    soft_masks: Literal["keep", "upper"] = "keep"
    """Letters in lower case of a FASTA sequence, which mark repeats: keep, or make them upper case."""
    weight: float = Field(default=1.0, gt=0, le=bounds.FACTOR)
    """Share of the training tokens, relative to the other sources."""


class Hub(Options):
    """A data set of the Hugging Face hub, read through `datasets`."""

    kind: Literal["hub"]
    dataset: str
    """Name of the data set, such as allenai/c4, or a local folder in the same format or from save_to_disk."""
    config: str | None = None
    """Configuration of the data set, where it has several."""
    split: str = "train"
    """Split to read."""
    column: str = "text"
    """Field of a record that holds the text."""
    streaming: bool = True
    """Read records as they arrive instead of downloading the data set first."""
    weight: float = Field(default=1.0, gt=0, le=bounds.FACTOR)
    """Share of the training tokens, relative to the other sources."""


Source = Annotated[PythonStdlib | Files | Hub, Field(discriminator="kind")]


class Validation(Options):
    """Text the model never trains on."""

    fraction: float = Field(default=0.05, gt=0, lt=1)
    """Share of the documents held out, chosen by a hash of their content, except near-copies of training documents;
    with fewer than 20, the end of each."""
    sources: list[Source] = Field(default=[])
    """Sources of their own for validation; with these, nothing is held out of training."""


class Tokenizer(Options):
    """How text becomes numbers, losslessly."""

    kind: Literal["sentencepiece", "bytes", "characters", "huggingface"] = "sentencepiece"
    """sentencepiece (subwords, trained on the corpus), bytes (256 symbols, nothing to train), characters (those of
    alphabet, nothing to train) or huggingface (an existing tokenizer.json, named by path)."""
    algorithm: Literal["bpe", "unigram"] = "bpe"
    """Algorithm that sentencepiece trains its pieces by."""
    vocabulary: int = Field(default=4096, ge=300, le=bounds.VOCABULARY)
    """Number of pieces sentencepiece may use."""
    sample_bytes: int = Field(default=16_000_000, gt=0, le=bounds.COUNT)
    """How much of the training text the sentencepiece trainer reads, spread over the corpus."""
    path: str | None = None
    """An existing sentencepiece .model or tokenizer.json, used as it is instead of training one."""
    alphabet: str | None = Field(default=None, min_length=1, max_length=bounds.VOCABULARY)
    """The characters of kind characters, such as ACGTN, each one token."""
    unknown: Literal["error", "replace"] = "error"
    """What to do with a character that alphabet lacks: error names it and stops, replace puts U+FFFD, a token too,
    counted."""

    @property
    def trained(self) -> bool:
        """Whether a sample of the text is read to make it."""
        return self.kind == "sentencepiece" and self.path is None

    @property
    def most_tokens(self) -> int:
        """How many tokens it has at most, those of the ends of a document among them."""
        if self.kind == "characters" and self.alphabet is not None:
            return len(set(self.alphabet) | ({"\ufffd"} if self.unknown == "replace" else set())) + 2
        return 258 if self.kind == "bytes" else self.vocabulary

    def disagreements(self) -> Iterator[PydanticCustomError]:
        if self.kind == "characters" and self.alphabet is None:
            yield mistake("alphabet", "a tokenizer of this kind needs one. Name its characters, such as ACGTN.")
        if self.kind != "characters" and self.alphabet is not None:
            yield mistake("alphabet", f"a tokenizer of kind {self.kind} has none. Set text.tokenizer.kind=characters.")
        repeated = [character for character, count in Counter(self.alphabet or "").items() if count > 1]
        if repeated:
            yield mistake("alphabet", f"has {min(repeated)!r} more than once. Name each character once.")
        if self.kind == "huggingface" and self.path is None:
            yield mistake("path", "a tokenizer of this kind is read from a file. Name a tokenizer.json.")


class Masking(Options):
    """objective: masked: which tokens are masked, for an encoder to predict them."""

    share: float = Field(default=0.15, gt=0, lt=1)
    """Share of the tokens of a text that are masked, at least one in each sequence."""
    kind: Literal["bert", "plain"] = "bert"
    """bert (of the masked tokens 80 % are replaced by the mask token, 10 % by a random one, 10 % unchanged) or plain
    (all by the mask token)."""


class Text(Options):
    """The text that is read, and how it is cut."""

    sources: list[Source] = Field(default=[PythonStdlib(kind="python-stdlib")], min_length=1)
    """Sources of documents; several are mixed by weight."""
    validation: Validation = Validation()
    tokenizer: Tokenizer = Tokenizer()
    sequence_length: Annotated[int, Field(ge=8, le=bounds.TOKENS), LENGTH] = 1024
    """Tokens in one training sequence."""
    rows: Literal["windows", "documents"] = "windows"
    """Content of a training sequence: windows of the text, cut anywhere, or whole documents, cut only where longer than
    a sequence; packed one after the other, or for an encoder, which would attend across them, each alone."""
    masking: Masking = Masking()
    encoding: str = "auto"
    """Encoding of plain text. auto takes that of a byte order mark, else UTF-8, else windows-1252 where a file is
    plausible as that and errors is strict; whatever is not UTF-8 is reported."""
    errors: Literal["strict", "replace"] = "strict"
    """What to do with bytes that are not of the encoding: strict names all such files and stops, replace puts U+FFFD,
    counted."""
    duplicates: Literal["keep", "drop"] = "keep"
    """Documents of the same text: keep reads all of them, drop only the first and reports the rest as skipped; of a
    text that is in text.validation.sources too, the training text loses it. It takes up to 72 bytes of memory a
    document."""

    def disagreements(self) -> Iterator[PydanticCustomError]:
        try:
            "".encode("utf-8" if self.encoding == "auto" else self.encoding)
        except LookupError:
            hint = nearest(self.encoding, ["auto", *(name.replace("_", "-") for name in aliases.aliases.values())])
            yield mistake("encoding", f"{self.encoding!r} is no encoding that Python knows.{hint}")
