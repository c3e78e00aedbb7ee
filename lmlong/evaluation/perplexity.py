"""Perplexity against length: the gain from text further back, on the same targets at every length.

By context: the same targets, far into their documents, with each length of text before them. By position: each document
is read once, from its beginning, and targets are grouped by the number of tokens before them.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from lmlong.data.token_dataset import prepare
from lmlong.data.token_file import TokenFile, tokens_of
from lmlong.errors import UsageError, nearest
from lmlong.evaluation import spans as cut
from lmlong.evaluation.document_sums import Sums
from lmlong.evaluation.results import AtLength, AtPosition, PerplexityReport
from lmlong.evaluation.scorer import Scorer, tokens_read
from lmlong.evaluation.spans import Documents
from lmlong.evaluation.state_health import health
from lmlong.inference.loading import TrainedLanguageModel, load
from lmlong.inference.trained_model import TrainedModel
from lmlong.io.cache import key_of
from lmlong.model.base import count_parameters
from lmlong.model.device import Precision, autocast, peak_memory
from lmlong.model.state_size import state_size
from lmlong.recipe import Files, PythonStdlib, Text, Validation
from lmlong.recipe.lengths import name_length
from lmlong.report.progress import Progress
from lmlong.report.table import plural

LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16_384)
"""The default lengths, besides the trained one."""

IDENTITY = 1 << 16
"""Tokens at the beginning of a text that identify it, beside the sizes of its documents."""

View = Literal["context", "position", "state"]
VIEWS: tuple[View, ...] = get_args(View)


TARGETS, MIN_DOCUMENTS = 8192, 10
"""The default number of targets at each context, and of documents that a length must reach."""


def evaluate(
    model: TrainedLanguageModel | str | Path,
    files: str | Path | Sequence[str | Path] | None = None,
    *,
    texts: str | Sequence[str] | None = None,
    lengths: Sequence[int] | None = None,
    views: Sequence[View] = VIEWS,
    targets: int = TARGETS,
    min_documents: int = MIN_DOCUMENTS,
    tokens: int | None = None,
    name: str | None = None,
    trained_lengths: Sequence[int] = (),
    precision: Precision | None = None,
) -> PerplexityReport:
    """Measure how well a model predicts text, and the gain from text further back.

    >>> report = lmlong.evaluate("runs/quickstart", lengths=[16, 32, 64], min_documents=1)
    >>> for length, sums, _ in report.context:
    ...     print(length, sums.totals.bits_per_byte, sums.bits_error)

    The text is what the run held out of its training, or that of `files`, folders and globs, or documents as `texts`,
    of which `tokens` limits the length. The other options are those of `lmlong eval`: `views` is its --by, `lengths`
    the contexts in tokens, `targets` the number of tokens scored at each; lengths that fewer than `min_documents`
    documents reach are left out, and fewer documents are cut into that many parts. To compare runs, give each the
    `trained_lengths` of all, so that their targets are the same. `precision` is the number format of the forward pass,
    "32", "bf16" or "16": by default that of training. All results are sums for each document, from which ratios and
    errors follow.
    """
    if unknown := [view for view in views if view not in VIEWS]:
        raise UsageError(f"views: there is no {unknown[0]!r}.{nearest(unknown[0], VIEWS)} Choose from {VIEWS}.")
    if lengths is not None and (not lengths or min(lengths) < 1):
        raise UsageError(f"lengths: {list(lengths)} are not lengths. Give numbers of tokens, from 1.")
    if files is not None and texts is not None:
        raise UsageError("files, texts: both are given. Give one of them.")
    given = texts if files is None else files
    if given is not None and not (given if isinstance(given, str | Path) else any(map(str, given))):
        raise UsageError("files, texts: empty. Name a text, or leave both out for the text held out of training.")
    loaded = model if isinstance(model, TrainedLanguageModel) else load(model, state_dtype="32")
    paths: Sequence[str | Path] = ()
    if texts is not None:
        text = tokens_of([texts] if isinstance(texts, str) else texts, loaded.tokenizer).first(tokens)
    else:
        paths = [files] if isinstance(files, str | Path) else files or ()
        text = validation_text(loaded, paths, tokens)
    whole = cut.documents_of(text)
    trained = loaded.recipe.text.sequence_length
    chosen = loaded.set_up_evaluation(precision)
    documents, requested = _enough(whole, lengths, (*LENGTHS, trained, *trained_lengths), min_documents)
    measured = [length for length in requested if cut.reached(documents, length) >= min_documents]
    report = PerplexityReport(
        name=name or str(loaded.checkpoint),
        checkpoint=str(loaded.checkpoint),
        parameters=count_parameters(loaded.model),
        state=state_size(loaded.model, loaded.learn),
        trained_length=trained,
        precision=chosen,
        weights=loaded.model.weight_format,
        trained_tokens=loaded.trained_tokens,
        carried_states=loaded.recipe.training.passes_states,
        documents=len(documents.begins),
        parts_of=None if documents is whole else len(whole.begins),
        text=_identity(text, whole, loaded),
        tokenizer=loaded.tokenizer.hash,
        data=[*map(str, paths)],
        lengths=measured,
        left_out=[length for length in requested if length not in measured],
    )
    with autocast(loaded.device, chosen):
        _read(report, Scorer(loaded, text.tokens, documents), views, targets, min_documents)
        if "state" in views:
            longest = int(documents.sizes.argmax())
            begin, end = documents.begins[longest], documents.ends[longest]
            report.health = health(loaded.model, text.tokens[begin : min(end, begin + measured[-1])])
    report.peak_bytes = peak_memory(loaded.device)
    return report


def _enough(
    documents: Documents, named: Sequence[int] | None, usual: Sequence[int], least: int
) -> tuple[Documents, list[int]]:
    """Return the documents, cut into parts if fewer than `least`, and the lengths: those that are named, or the usual
    ones, with shorter ones for a short text."""
    lengths = set(named or usual)
    while True:
        need = min(lengths) + cut.block_size(min(lengths))
        enough = cut.reached(documents, min(lengths)) >= least
        if read := documents if enough else cut.parts(documents, need, least):
            if not named and sum(cut.reached(read, length) >= least for length in lengths) < 2:
                lengths.add(max(1, min(lengths) // 2))  # two show what context is worth
            return read, sorted(lengths)
        if named or min(lengths) == 1:
            raise UsageError(_too_short(documents, need, least))
        lengths.add(min(lengths) // 2)


def _identity(text: TokenFile, documents: Documents, loaded: TrainedLanguageModel) -> str:
    """Return a hash of the sizes of the documents in bytes and of the beginning of the text."""
    sizes = loaded.tokenizer.token_bytes
    bytes_of = [
        int(sizes[text.tokens[begin:end]].sum()) for begin, end in zip(documents.begins, documents.ends, strict=True)
    ]
    return key_of(bytes_of, loaded.tokenizer.decode(text.tokens[:IDENTITY])[: IDENTITY // 4])


def _read(report: PerplexityReport, scorer: Scorer, views: Sequence[View], targets: int, least: int) -> None:
    """Read the text of the views by context and position, and fill in the report."""
    by_context = {}
    if "context" in views:
        longest = report.lengths[-1]
        size = min(cut.block_size(longest), max(1, targets // max(1, least)))
        blocks = cut.choose_blocks(scorer.documents, longest, size, targets, least)
        by_context = {length: blocks.after(length) for length in report.lengths}
    whole = cut.whole(scorer.documents) if "position" in views else None
    report.tokens = sum(map(tokens_read, by_context.values())) + (tokens_read(whole) if whole else 0)
    begun = time.perf_counter()
    with Progress(report.name, report.tokens, "tokens") as progress:
        for length, spans in by_context.items():
            progress.begin(f"{report.name}: context {name_length(length)}")
            before, sums = time.perf_counter(), scorer.sums(spans, progress)
            report.context.append(AtLength(length, sums, time.perf_counter() - before))
        if whole:
            progress.begin(f"{report.name}: position")
            positions: dict[int, Sums] = {}
            report.carried = scorer.sums(whole, progress, positions)
            reached = [bucket for bucket in sorted(positions) if positions[bucket].documents >= least]
            report.position = [AtPosition(1 << bucket, (2 << bucket) - 1, positions[bucket]) for bucket in reached]
    report.seconds = time.perf_counter() - begun


def _too_short(documents: Documents, need: int, least: int) -> str:
    enough, longest = int((documents.sizes >= need).sum()), int(documents.sizes.max(initial=0))
    return (
        f"--lengths: the shortest takes {plural(least, 'document')} of {need:,} tokens, the targets included, so that "
        f"errors can be estimated. The text has {enough}, the longest of {longest:,} tokens, and is too short to cut "
        "into as many parts. Give shorter lengths, more text (--data), or fewer --min-documents."
    )


def validation_text(loaded: TrainedModel, files: Sequence[str | Path] = (), limit: int | None = None) -> TokenFile:
    """Return the tokens to measure on: the text held out of training, or all of some files; the first `limit`."""
    return prepare(text_options(loaded, files), loaded.tokenizer).validation.first(limit)


def text_options(loaded: TrainedModel, files: Sequence[str | Path]) -> Text:
    """Return the recipe's text, or one with some files as its validation text."""
    text = loaded.recipe.text
    if not files:
        return text
    columns = [each.column for each in text.sources if not isinstance(each, PythonStdlib)]
    source = Files(kind="files", paths=list(map(str, files)), column=columns[0] if text.labels and columns else "text")
    # the files are the training text too: the shortest sequence accepts files of any size, and duplicates are kept
    validation = Validation(sources=[source])
    changed = {"sources": [source], "validation": validation, "sequence_length": 8, "duplicates": "keep"}
    return text.model_copy(update=changed)
