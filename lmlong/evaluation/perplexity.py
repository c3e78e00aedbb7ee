"""Perplexity against length: the gain from text further back, on the same targets at every length.

By context: the same targets, far into their documents, with each length of text before them. From the same pass: by
recurrence, the targets grouped by how far back the same token or word last occurred; and remembrance, how far the text
before changes the predictions. By position: each document is read once, from its beginning, and targets are grouped by
the number of tokens before them. By protocol: all targets, with the state emptied at each window or with overlapping
windows, against a state that is carried.
"""

import sys
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch

from lmlong import __version__
from lmlong.attention.plugins import plugin_hashes
from lmlong.data.token_dataset import prepare, validation_fields
from lmlong.data.token_file import TokenFile, tokens_of
from lmlong.errors import UsageError, nearest
from lmlong.evaluation import spans as cut
from lmlong.evaluation.context_views import ContextViews, training_targets
from lmlong.evaluation.document_sums import Clusters, Sums, clusters_by
from lmlong.evaluation.kept_steps import KeptSteps
from lmlong.evaluation.results import AtPosition, InWindows, PerplexityReport
from lmlong.evaluation.scorer import Scorer, tokens_read
from lmlong.evaluation.spans import Documents, Spans
from lmlong.evaluation.state_health import health
from lmlong.inference.loading import TrainedLanguageModel, TrainedModel, load
from lmlong.io.cache import key_of
from lmlong.model.base import count_parameters
from lmlong.model.device import describe_machine, peak_memory
from lmlong.model.precision import Precision, autocast
from lmlong.model.state_size import state_size
from lmlong.recipe import Files, Text, Validation
from lmlong.recipe.lengths import name_length
from lmlong.report.progress import Progress
from lmlong.report.table import plural

LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16_384)
"""The default lengths, besides the trained one."""

IDENTITY = 1 << 16
"""Tokens at the beginning of a text that identify it, beside the sizes of its documents."""

View = Literal["context", "recurrence", "remembrance", "position", "protocol", "state"]
VIEWS: tuple[View, ...] = get_args(View)
OF_CONTEXT = ("context", "recurrence", "remembrance")
"""The views of the same targets at each length."""


class PerplexityOptions(NamedTuple):
    """Which views to measure, over which lengths and targets."""

    views: tuple[View, ...] = ("context", "position", "state")
    lengths: tuple[int, ...] | None = None
    """Contexts and windows, in tokens; None for the default ones and the trained length."""
    targets: int = 8192
    """Approximate number of tokens scored at each context; at least one in each of `min_documents` documents."""
    min_documents: int = 10
    """Lengths that fewer documents reach are left out; fewer documents are cut into this many parts."""
    trained_lengths: tuple[int, ...] = ()
    """The trained lengths of other runs, which are added to the default lengths in a comparison."""
    cache_baseline: bool = False
    """Whether to measure the gain by a cache of counts."""
    precision: Precision | None = None
    """Number format of the forward pass; None for that of training."""
    after: int | None = None
    """Tokens that the targets of contexts have before them at least, if more than the longest context."""


DEFAULTS = PerplexityOptions()


def evaluate(
    model: TrainedLanguageModel | str | Path,
    files: str | Path | Sequence[str | Path] | None = None,
    *,
    texts: str | Sequence[str] | None = None,
    lengths: Sequence[int] | None = None,
    views: Sequence[View] = DEFAULTS.views,
    targets: int = DEFAULTS.targets,
    min_documents: int = DEFAULTS.min_documents,
    tokens: int | None = None,
    name: str | None = None,
    trained_lengths: Sequence[int] = (),
    cache_baseline: bool = False,
    cluster_by: str | None = None,
    precision: Precision | None = None,
    resume_as: str | None = None,
    after: int | None = None,
) -> PerplexityReport:
    """Measure how well a model predicts text, and the gain from text further back.

    >>> report = lmlong.evaluate("runs/quickstart", lengths=[16, 32, 64], min_documents=1)
    >>> for length, sums, _ in report.context:
    ...     print(length, sums.totals.bits_per_byte, sums.bits_error)

    The text is what the run held out of its training, or that of `files`, folders and globs, or documents as `texts`,
    of which `tokens` limits the length. The other options are those of `lmlong eval`: `views` is its --by, `lengths`
    the contexts in tokens, `targets` the number of tokens scored at each; lengths that fewer than `min_documents`
    documents reach are left out, and fewer documents are cut into that many parts. To compare runs, give each the
    `trained_lengths` of all, so that their targets are the same; `after` is how many tokens these have before them, by
    default the longest length: a model that cannot read so much has the same targets as one that can. With
    `cache_baseline`, counts of the document's n-grams are mixed with the model, to see what it fails to use. With
    `cluster_by`, documents with the same value of that field count as one for the errors. `precision` is the number
    format of the forward pass, "32", "bf16" or "16": by default that of training. With `resume_as`, a name of how the
    model was loaded, finished parts are kept in the cache until the measurement ends, so that one that was killed
    continues when it is called again, and a line on stderr says how much will be read. All results are sums for each
    document, from which ratios and errors follow.
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
    if texts is not None and cluster_by:
        raise UsageError("cluster_by, texts: texts in memory have no fields. Give files, or leave cluster_by out.")
    clusters = None
    paths: Sequence[str | Path] = ()
    if texts is not None:
        text = tokens_of([texts] if isinstance(texts, str) else texts, loaded.tokenizer).first(tokens)
    else:
        paths = [files] if isinstance(files, str | Path) else files or ()
        text = validation_text(loaded, paths, tokens)
        if cluster_by:
            clusters = clusters_by(cluster_by, validation_fields(_text_options(loaded, paths)))
    contexts = tuple(sorted(set(lengths))) if lengths is not None else None
    options = PerplexityOptions(
        tuple(views), contexts, targets, min_documents, tuple(trained_lengths), cache_baseline, precision, after
    )
    report = measure_perplexity(name or str(loaded.checkpoint), loaded, text, options, clusters, resume_as)
    report.data = [*map(str, paths)]
    return report


def measure_perplexity(
    name: str,
    loaded: TrainedLanguageModel,
    text: TokenFile,
    options: PerplexityOptions = DEFAULTS,
    clusters: Clusters | None = None,
    resume_as: str | None = None,
) -> PerplexityReport:
    """Measure the views of a model on a text; the options are those of `evaluate`."""
    whole = cut.documents_of(text, clusters and clusters.number[: len(text.starts)])
    trained = loaded.recipe.text.sequence_length
    precision = loaded.set_up_evaluation(options.precision)
    documents, requested = _enough(whole, trained, options)
    lengths = [length for length in requested if cut.reached(documents, length) >= options.min_documents]
    report = PerplexityReport(
        name=name,
        checkpoint=str(loaded.checkpoint),
        parameters=count_parameters(loaded.model),
        state=state_size(loaded.model, loaded.learn),
        trained_length=trained,
        precision=precision,
        weights=loaded.model.weight_format,
        trained_tokens=loaded.trained_tokens,
        carried_states=loaded.recipe.training.passes_states,
        documents=len(documents.begins),
        parts_of=None if documents is whole else len(whole.begins),
        text=_identity(text, whole, loaded),
        tokenizer=loaded.tokenizer.hash,
        cluster_by=clusters and clusters.field,
        clusters=None if documents.cluster is None else len(np.unique(documents.cluster)),
        lengths=lengths,
        left_out=[length for length in requested if length not in lengths],
    )
    if "remembrance" in options.views and len(lengths) < 2:
        reached = f"only {name_length(lengths[0])} is" if lengths else "none is"
        raise UsageError(f"--by remembrance: compares lengths, and {reached} reached. Give several in --lengths.")
    kept = _kept(loaded, text, documents, options._replace(precision=precision), resume_as)
    scorer = Scorer(loaded, text.tokens, documents, kept)
    with autocast(loaded.device, precision):
        _fill(report, scorer, lengths, options, loaded)
        if "state" in options.views:
            longest = int(documents.sizes.argmax())
            begin, end = documents.begins[longest], documents.ends[longest]
            report.health = health(loaded.model, text.tokens[begin : min(end, begin + lengths[-1])])
    report.peak_bytes = peak_memory(loaded.device)
    kept.finish()
    return report


def _kept(
    loaded: TrainedLanguageModel,
    text: TokenFile,
    documents: Documents,
    options: PerplexityOptions,
    resume_as: str | None,
) -> KeptSteps:
    """Return the finished steps of an interrupted measurement of the same model, loaded the same way, on the same text
    and machine."""
    if resume_as is None:
        return KeptSteps()
    return KeptSteps(
        "evaluations",
        *(
            resume_as,
            loaded.owners,
            loaded.learn,
            plugin_hashes(loaded.recipe.model.attention),
            loaded.model.kernel_names,
        ),
        *(
            sha256(np.ascontiguousarray(text.tokens).data).hexdigest(),
            documents.begins.tolist(),
            documents.ends.tolist(),
        ),
        *(repr(options), __version__, torch.__version__, describe_machine(loaded.device)),
    )


def _enough(documents: Documents, trained: int, options: PerplexityOptions) -> tuple[Documents, list[int]]:
    """Return the documents, cut into parts if they are too few, and the requested lengths: for a short text shorter
    ones than the default, unless the options name them."""
    lengths = set(options.lengths or (*LENGTHS, trained, *options.trained_lengths))
    while True:
        need = min(lengths) + cut.block_size(min(lengths))
        if cut.reached(documents, min(lengths)) >= options.min_documents:
            return documents, sorted(lengths)
        if parts := cut.parts(documents, need, options.min_documents):
            return parts, sorted(lengths)
        if options.lengths or min(lengths) == 1:
            raise UsageError(_too_short(documents, need, options.min_documents))
        lengths.add(min(lengths) // 2)


def _identity(text: TokenFile, documents: Documents, loaded: TrainedLanguageModel) -> str:
    """Return a hash of the sizes of the documents in bytes and of the beginning of the text."""
    sizes = loaded.tokenizer.token_bytes
    bytes_of = [
        int(sizes[text.tokens[begin:end]].sum()) for begin, end in zip(documents.begins, documents.ends, strict=True)
    ]
    return key_of(bytes_of, loaded.tokenizer.decode(text.tokens[:IDENTITY])[: IDENTITY // 4])


def _fill(
    report: PerplexityReport,
    scorer: Scorer,
    lengths: list[int],
    options: PerplexityOptions,
    loaded: TrainedLanguageModel,
) -> None:
    """Read the spans of all views and fill in the report."""
    blocks = None
    if options.cache_baseline or any(view in OF_CONTEXT for view in options.views):
        after = max(lengths[-1], options.after or 0)
        size = min(cut.block_size(after), max(1, options.targets // max(1, options.min_documents)))
        if cut.reached(scorer.documents, after, size) < options.min_documents:
            raise UsageError(_too_far(scorer.documents, after, size, options.min_documents))
        blocks = cut.choose_blocks(scorer.documents, after, size, options.targets, options.min_documents)
    jobs = _jobs(scorer.documents, lengths, options)
    report.tokens = sum(tokens_read(spans) for spans in jobs.values())
    if blocks:
        report.tokens += sum(tokens_read(blocks.after(length)) for length in lengths)
    passes = len(lengths) * bool(blocks) + len(jobs)
    if scorer.kept.is_kept:
        print(_announcement(report, scorer, passes), file=sys.stderr)
    positions: dict[int, Sums] = {}
    sums = {}
    with Progress(report.name, report.tokens, "tokens") as progress:
        if blocks:
            views = ContextViews(scorer, blocks, lengths, options.views, progress)
            views.fill(report)
        for (kind, length), spans in jobs.items():
            part = f"{kind} {name_length(length)}" if length else kind
            progress.begin(f"{report.name}: {part}")
            sums[kind, length] = scorer.sums(spans, progress, positions if kind == "carried" else None, part)
    report.seconds = scorer.seconds
    if blocks and options.cache_baseline:
        fitted_on = training_targets(loaded, lengths, max(1, options.targets // 2), scorer.kept)
        views.fill_cache(report, fitted_on)
    report.carried = sums.get(("carried", 0))
    if "position" in options.views:
        reached = [bucket for bucket in sorted(positions) if positions[bucket].documents >= options.min_documents]
        report.position = [AtPosition(1 << bucket, (2 << bucket) - 1, positions[bucket]) for bucket in reached]
    if "protocol" in options.views:
        report.windows = [InWindows(length, sums["reset", length], sums["sliding", length]) for length in lengths]


def _announcement(report: PerplexityReport, scorer: Scorer, passes: int) -> str:
    """Return a line that says how much will be read."""
    count, times = len(scorer.documents.begins), f"{passes} pass{'es' if passes > 1 else ''}"
    of = f"{count:,} {report.unit}{'s' if count > 1 else ''} of {int(scorer.documents.sizes.sum()):,} tokens"
    resumed = ", continuing an interrupted evaluation" if scorer.kept.resumed else ""
    return f"{report.name}: reading {report.tokens:,} tokens in {times} over {of}{resumed}"


def _jobs(documents: Documents, lengths: list[int], options: PerplexityOptions) -> dict[tuple[str, int], Spans]:
    """Return the spans of whole documents to read, by kind and length."""
    jobs: dict[tuple[str, int], Spans] = {}
    if "position" in options.views or "protocol" in options.views:
        jobs["carried", 0] = cut.whole(documents)
    if "protocol" in options.views:
        jobs |= {("reset", length): cut.windows(documents, length, length) for length in lengths}
        jobs |= {("sliding", length): cut.windows(documents, length, max(1, length // 2)) for length in lengths}
    return jobs


def _too_short(documents: Documents, need: int, least: int) -> str:
    enough, longest = int((documents.sizes >= need).sum()), int(documents.sizes.max(initial=0))
    return (
        f"--lengths: the shortest takes {plural(least, 'document')} of {need:,} tokens, the targets included, so that "
        f"errors can be estimated. The text has {enough}, the longest of {longest:,} tokens, and is too short to cut "
        "into as many parts. Give shorter lengths, more text (--data), or fewer --min-documents."
    )


def _too_far(documents: Documents, after: int, size: int, least: int) -> str:
    return (
        f"--after: {cut.reached(documents, after, size)} documents have targets after {after:,} tokens, and "
        f"--min-documents asks for {least}. The longest has {int(documents.sizes.max()):,} tokens. Give a shorter "
        "length, more text (--data), or fewer --min-documents."
    )


def validation_text(loaded: TrainedModel, files: Sequence[str | Path] = (), limit: int | None = None) -> TokenFile:
    """Return the tokens to measure on: the text held out of training, or all of some files; the first `limit`."""
    return prepare(_text_options(loaded, files), loaded.tokenizer).validation.first(limit)


def _text_options(loaded: TrainedModel, files: Sequence[str | Path]) -> Text:
    """Return the recipe's text, or one with some files as its validation text."""
    text = loaded.recipe.text
    if not files:
        return text
    source = Files(kind="files", paths=list(map(str, files)))
    # the files are the training text too: the shortest sequence accepts files of any size, and duplicates are kept
    validation = Validation(sources=[source])
    changed = {"sources": [source], "validation": validation, "sequence_length": 8, "duplicates": "keep"}
    return text.model_copy(update=changed)
