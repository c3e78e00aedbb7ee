"""Reports with numbers that are easy to follow."""

import json
from typing import Any

from lmlong.evaluation.document_sums import Sums
from lmlong.evaluation.perplexity_report import perplexity_report
from lmlong.evaluation.results import AtLength, AtPosition, PerplexityReport
from lmlong.evaluation.state_health import Health
from lmlong.model.state_size import Size, StateSize


def sums(*nats: float, tokens: int = 1000, size: int = 4000) -> Sums:
    """So many nats a token in each document, all of one size."""
    made = Sums(len(nats))
    for document, each in enumerate(nats):
        made.add(document, each * tokens, tokens, size)
    return made


def values(*reports: PerplexityReport) -> Any:
    """Return what JSON holds of reports."""
    return json.loads(perplexity_report(reports).json())


LINEAR = PerplexityReport(
    name="linear",
    checkpoint="/runs/linear/checkpoints/step-00002000",
    parameters=1_234_567,
    state=StateSize(Size(49_921, 199_688), Size(0, 0)),
    trained_length=1024,
    trained_tokens=2_560_000,
    documents=2,
    left_out=[4096],
    context=[AtLength(256, sums(2.0, 2.2), 1.25), AtLength(1024, sums(1.9, 2.0), 12.5)],
    position=[AtPosition(1, 1, sums(3.0, 5.0)), AtPosition(1024, 2047, sums(1.0, 2.0))],
    carried=sums(1.5, 2.5),
    health=[Health(1, 12.5, 31.5, 40, 20.375), Health(2048, 6834.0, 38.0, 40, 0.00123)],
    tokens=123_456,
    seconds=12.3,
    peak_bytes=456_700_000,
)
SOFTMAX = PerplexityReport(
    name="softmax",
    checkpoint="/runs/softmax/checkpoints/step-00002000",
    parameters=1_000,
    weights="int4",
    data=[f"/books/{name}.txt" for name in ("one", "two", "three " * 12, "four")],
    state=StateSize(Size(577, 2308), Size(514, 2050)),
    trained_length=512,
    context=[AtLength(16_384, sums(1000.0, size=0), 123_456.78)],
    tokens=1000,
    seconds=0.5,
    peak_bytes=1_000_000,
)
