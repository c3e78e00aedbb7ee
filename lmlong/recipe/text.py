"""Options of the text: its sources, its tokenizer, and how it is cut into sequences."""

from collections import Counter
from collections.abc import Iterator
from encodings import aliases
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from lmlong.errors import nearest
from lmlong.recipe import bounds
from lmlong.recipe.option_types import FILE_NAMES, LENGTH
from lmlong.recipe.section import Options, mistake


class PythonStdlib(Options):
    """The standard library of the running Python, without tests and encodings: a corpus available on every machine."""

    kind: Literal["python-stdlib"]
    weight: float = Field(default=1.0, gt=0, le=bounds.FACTOR)
    """Share of the training tokens, relative to the other sources."""


class Files(Options):
    """Files on disk. Each .txt, .epub, .docx, .pdf or .html file is one document; each record of .jsonl, .ndjson,
    .json, .csv, .tsv, .parquet, .arrow and FASTA is one document; ZIP and TAR archives are read file by file."""

    kind: Literal["files"]
    paths: Annotated[list[str], FILE_NAMES] = Field(min_length=1)
    """Files, folders or globs (** crosses folders), also compressed by .gz, .zst, .bz2 or .xz. Relative paths start at
    the current folder. One text with commas is a list: paths=a.txt,b.txt. In a folder, .txt, .md, .py, .jsonl, .ndjson,
    .parquet, .arrow, FASTA, documents and archives are read; all other files are reported as left out. - is standard
    input, read as plain text, -.jsonl (or another suffix) as a file with that suffix; a copy is kept in the cache.
    hf://datasets/OWNER/NAME@REVISION/PATH is a file, folder or glob of a data set on the Hugging Face Hub; without
    @REVISION, its newest commit."""
    column: str = "text"
    """Field of a record that holds the text."""
    soft_masks: Literal["keep", "upper"] = "keep"
    """Lower-case letters of a FASTA sequence, which mark repeats: keep them, or convert them to upper case."""
    weight: float = Field(default=1.0, gt=0, le=bounds.FACTOR)
    """Share of the training tokens, relative to the other sources."""


class Hub(Options):
    """A data set of the Hugging Face hub, read by `datasets`."""

    kind: Literal["hub"]
    dataset: str
    """Name of the data set, such as allenai/c4, or a local folder in the same format or from save_to_disk."""
    config: str | None = None
    """Configuration of the data set, if it has several."""
    split: str = "train"
    """Split to read."""
    column: str = "text"
    """Field of a record that holds the text."""
    streaming: bool = True
    """Stream records instead of downloading the whole data set first."""
    weight: float = Field(default=1.0, gt=0, le=bounds.FACTOR)
    """Share of the training tokens, relative to the other sources."""


def _with_kind(source: Any) -> Any:
    """Return a source of kind files if it has paths and no kind."""
    return {"kind": "files", **source} if isinstance(source, dict) and "paths" in source else source


Source = Annotated[PythonStdlib | Files | Hub, Field(discriminator="kind"), BeforeValidator(_with_kind)]


class Validation(Options):
    """Text that the model never trains on."""

    fraction: float = Field(default=0.05, gt=0, lt=1)
    """Share of documents held out, chosen by a hash of their content; near-copies of training documents are not held
    out. With fewer than 20 documents, the end of each is held out."""
    sources: list[Source] = Field(default=[])
    """Separate sources for validation; if given, nothing is held out of the training text."""


class Tokenizer(Options):
    """How text becomes tokens, losslessly."""

    kind: Literal["sentencepiece", "bytes", "characters", "huggingface"] = "sentencepiece"
    """sentencepiece (subwords, trained on the corpus), bytes (256 symbols, no training), characters (those of alphabet,
    no training) or huggingface (an existing tokenizer.json, given by path)."""
    algorithm: Literal["bpe", "unigram"] = "bpe"
    """Training algorithm of sentencepiece."""
    vocabulary: int = Field(default=4096, ge=300, le=bounds.VOCABULARY)
    """Maximum number of sentencepiece pieces."""
    sample_bytes: int = Field(default=16_000_000, gt=0, le=bounds.COUNT)
    """Bytes of training text that the sentencepiece trainer reads, spread over the corpus."""
    path: str | None = None
    """An existing sentencepiece .model or tokenizer.json to use instead of training a tokenizer."""
    alphabet: str | None = Field(default=None, min_length=1, max_length=bounds.VOCABULARY)
    """kind: characters: the characters, such as ACGTN; each is one token."""
    unknown: Literal["error", "replace"] = "error"
    """What to do with a character that is not in alphabet: stop with an error that names it, or replace it by U+FFFD,
    which is a token too, and report the count."""

    @property
    def trained(self) -> bool:
        """Whether the tokenizer is trained on a sample of the text."""
        return self.kind == "sentencepiece" and self.path is None

    @property
    def most_tokens(self) -> int:
        """Maximum number of tokens, including those that begin and end a document."""
        if self.kind == "characters" and self.alphabet is not None:
            return len(set(self.alphabet) | ({"\ufffd"} if self.unknown == "replace" else set())) + 2
        return 258 if self.kind == "bytes" else self.vocabulary

    def disagreements(self) -> Iterator[PydanticCustomError]:
        if self.kind == "characters" and self.alphabet is None:
            yield mistake("alphabet", "required by a tokenizer of this kind. Give its characters, such as ACGTN.")
        if self.kind != "characters" and self.alphabet is not None:
            why = f"not used by a tokenizer of kind {self.kind}. Set text.tokenizer.kind=characters."
            yield mistake("alphabet", why)
        repeated = [character for character, count in Counter(self.alphabet or "").items() if count > 1]
        if repeated:
            yield mistake("alphabet", f"contains {min(repeated)!r} more than once. Give each character once.")
        if self.kind == "huggingface" and self.path is None:
            yield mistake("path", "required by a tokenizer of this kind. Name a tokenizer.json.")


class Masking(Options):
    """Options of objective: masked: which tokens are masked, for an encoder to predict."""

    share: float = Field(default=0.15, gt=0, lt=1)
    """Share of tokens that are masked; at least one in each sequence."""
    kind: Literal["bert", "plain"] = "bert"
    """How tokens are masked: bert (80 % become the mask token, 10 % a random token, 10 % stay unchanged) or plain (all
    become the mask token)."""


class Labels(Options):
    """Options of objective: label: where the label of each document is."""

    field: str = "label"
    """Field of a record that holds its label: text, a whole number, true or false. For documents that are files,
    `folder` is the name of their folder."""
    names: list[str] = Field(default=[], max_length=bounds.LABELS)
    """All labels; left out, those that occur in the text, sorted."""

    def disagreements(self) -> Iterator[PydanticCustomError]:
        if repeated := [name for name, count in Counter(self.names).items() if count > 1]:
            yield mistake("names", f"{repeated[0]!r} is named twice. Name each label once.")
        if len(self.names) == 1:
            yield mistake("names", "with one label there is nothing to choose. Name two or more, or leave names out.")


SHORT_PARTS = 4
"""Parts of a sequence that `short_steps` read apart."""

ROW_LENGTHS = 16
"""Maximum number of different lengths of training batches, so that memory and compiled code are reused."""


class Text(Options):
    """The training text, and how it is cut into sequences."""

    sources: list[Source] = Field(default=[PythonStdlib(kind="python-stdlib")], min_length=1)
    """Sources of documents; several are mixed by weight."""
    validation: Validation = Validation()
    tokenizer: Tokenizer = Tokenizer()
    sequence_length: Annotated[int, Field(ge=8, le=bounds.TOKENS), LENGTH] = 1024
    """Tokens in one training sequence."""
    short_steps: int = Field(default=0, ge=0, le=bounds.COUNT)
    """Steps at the beginning that read four times as many sequences of a quarter of the length, from more places of the
    text: most of what a model learns first needs little context. For windows, without states passed between batches."""
    rows: Literal["windows", "documents"] = "windows"
    """Content of a training sequence. windows: windows of the text, cut anywhere. documents: whole documents, cut only
    if longer than a sequence, and packed one after another; an encoder, which would attend across them, gets one
    document in each sequence."""
    masking: Masking = Masking()
    labels: Labels | None = None
    encoding: str = "auto"
    """Encoding of plain text. auto: by the byte order mark, else UTF-8; with errors: strict, windows-1252 if a file is
    not UTF-8 but plausible in it. Files that are not UTF-8 are reported."""
    errors: Literal["strict", "replace"] = "strict"
    """What to do with bytes that are invalid in the encoding: strict stops and names all such files, replace inserts
    U+FFFD and reports the count."""
    duplicates: Literal["keep", "drop"] = "keep"
    """Documents with identical text. keep: read all. drop: read only the first, report the others as skipped, and drop
    training documents that are also in text.validation.sources. Takes up to 72 bytes of memory for each document."""

    def disagreements(self) -> Iterator[PydanticCustomError]:
        try:
            "".encode("utf-8" if self.encoding == "auto" else self.encoding)
        except LookupError:
            hint = nearest(self.encoding, ["auto", *(name.replace("_", "-") for name in aliases.aliases.values())])
            yield mistake("encoding", f"{self.encoding!r} is not an encoding that Python supports.{hint}")
