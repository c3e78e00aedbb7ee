"""Whether the numbers are right on this device: the kernels against the definition in float64, and the laws."""

import copy
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from gpu_report_parts import attentions
from gpu_report_parts.attentions import Text
from gpu_report_parts.part import ATTENTIONS, Job
from lmlong.attention import laws
from lmlong.report.table import Column, format_table

HEADS, ROWS = 2, 2

FORMATS = {"32": torch.float32, "bf16": torch.bfloat16}

ALLOWED = {"32": 2e-5, "bf16": 2e-2}
"""Errors relative to the norm that are rounding; four times those of torch's operations are too."""

EXACT = ("the future never changes the past", "a state is not modified", "rows are independent")
"""Laws that leave no room for rounding."""


def check(job: Job) -> None:
    """Check every attention in every width and format that is measured, and the laws of each."""
    errors: list[dict[str, Any]] = []
    kept: list[dict[str, Any]] = []
    for name in ATTENTIONS:
        for head_dim in job.sizes.head_dims:
            for precision in FORMATS:
                what = f"{name}, head_dim {head_dim}, {precision}"
                if one := job.attempt(what, partial(against_definition, name, head_dim, precision, job)):
                    errors.append({"attention": name, "head_dim": head_dim, "precision": precision, **one})
                    job.found.failures += [f"{what}: {wrong}" for wrong in one["wrong"]]
        if one := job.attempt(f"laws of {name}", partial(errors_of_laws, name, job)):
            kept.append({"attention": name, **one})
            job.found.failures += [
                f"{name} breaks a law: {law}, by {by:.1e}" for law, by in one.items() if broken(law, by)
            ]
        job.found.figures = {"errors": errors, "laws": kept}
        job.found.lines = [*error_lines(errors), "", *law_lines(kept)]
        job.found.save()


@cache
def against_definition(name: str, head_dim: int, precision: str, job: Job) -> dict[str, Any]:
    """Return the errors of outputs and gradients by the kernels and by torch's operations, and which are wrong."""
    found: dict[str, Any] = {}
    for by in ("triton", "torch"):
        attention = attentions.build(name, HEADS, head_dim, job.device, by)
        x = attentions.supplied(attention, text(job, head_dim, FORMATS[precision]))
        exact = partial(attentions.definition, copy.deepcopy(attention).double())
        truth = attentions.output_and_grads(exact, x.map(Tensor.double))
        mine = attentions.output_and_grads(partial(attentions.forward, attention), x)
        found[by] = {tensor: laws.error(mine[tensor], truth[tensor]) for tensor in truth}
    found["wrong"] = [
        f"the error of {tensor} is {error:.1e}, by torch's operations {found['torch'][tensor]:.1e}"
        for tensor, error in found["triton"].items()
        if not error <= max(ALLOWED[precision], 4 * found["torch"][tensor])
    ]
    return found


@torch.no_grad()
def errors_of_laws(name: str, job: Job) -> dict[str, float]:
    """Return how far the kernels, in float32, are from each law; by torch are single tokens."""
    time = job.sizes.checked
    attention = attentions.build(name, HEADS, min(job.sizes.head_dims), job.device, "triton")
    texts = [text(job, min(job.sizes.head_dims), torch.float32, seed) for seed in (0, 1)]
    packed, other = (attentions.supplied(attention, one, seed) for seed, one in enumerate(texts))
    x, packed, other = (one.flat for one in (packed._replace(document_starts=None), packed, other))
    subject = laws.of_attention(attention, texts[0].q)
    places = (1, 64, time - 1)
    return {
        "token by token = at once": laws.steps_equal_forward(subject, x),
        "any cut = at once": laws.cuts_change_nothing(subject, x, [1, 64, 65]),
        "the future never changes the past": max(laws.future_leaves_past(subject, x, other, at) for at in places),
        "a state is not modified": laws.state_is_not_modified(subject, x),
        "rows are independent": laws.rows_are_independent(subject, x, other),
        "documents are independent": laws.documents_are_independent(subject, packed, x, begins(time)),
    }


def text(job: Job, head_dim: int, dtype: torch.dtype, seed: int = 0) -> Text:
    """Draw a text of a few documents."""
    time = job.sizes.checked
    starts = torch.zeros(ROWS, time, dtype=torch.bool, device=job.device)
    starts[:, begins(time)] = True
    return attentions.draw((ROWS, HEADS, time, head_dim), dtype, job.device, seed)._replace(document_starts=starts)


def begins(time: int) -> list[int]:
    """Return where documents begin: two of them within one tile of the kernels, one with the next tile."""
    return sorted({0, time // 3, time // 3 + 1, 64})


def broken(law: str, error: float) -> bool:
    return not error <= (0.0 if law in EXACT else ALLOWED["32"])


def error_lines(errors: list[dict[str, Any]]) -> list[str]:
    if not errors:
        return []
    columns = [Column("attention", 14, align="<"), Column("head_dim", 9), Column("format", 8)]
    names = ("y", "dq", "dk", "dv", "dlog_decay")
    columns += [Column(name, 14, ".1e") for name in (*names, "torch's worst")] + [Column("", 7)]
    rows = []
    for one in errors:
        mine, worst = one["triton"], max(one["torch"].values())
        cells = [mine.get(name) for name in names]
        verdict = "WRONG" if one["wrong"] else "right"
        rows.append([one["attention"], one["head_dim"], one["precision"], *cells, worst, verdict])
    text = "Errors of the Triton kernels relative to the norm, against the definition in float64 on the same numbers:"
    return [text, "", "```", *format_table(columns, rows), "```"]


def law_lines(kept: list[dict[str, Any]]) -> list[str]:
    if not kept:
        return []
    columns = [Column("law", 36, align="<"), *(Column(one["attention"], 15, ".1e") for one in kept)]
    rows = [[law, *(one[law] for one in kept)] for law in kept[0] if law != "attention"]
    text = "The laws of attention, by the kernels in float32; 0 is exact:"
    return [text, "", "```", *format_table(columns, rows), "```"]
