"""Detection of planted anomalies in a log, by the surprisal of lines, their length, and the rarity of templates."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from lmlong.inference.loading import TrainedLanguageModel
from lmlong.model.language_model import PIECE
from lmlong.report.figure import Figure, Line, Panel, Style, style
from lmlong.report.json_values import json_values
from lmlong.report.table import Column, format_table
from lmlong.surprisal.robust_score import RobustScore
from lmlong.surprisal.stream import score
from planted_parts.anomaly_ranking import Alarms, Curve, alarms_above, anomalous, curve_of
from planted_parts.service_log import ANOMALIES, ServiceLog

MASKED = re.compile(r"\b(?=[a-z]*\d)[0-9a-f]{6}\b|\d+")
"""Request ids, and numbers."""


class Detection(NamedTuple):
    """The scores of one method, and their precision and recall."""

    method: str
    scores: np.ndarray  # of each line, nan without a score
    curve: Curve
    alarms: list[Alarms]  # at the given thresholds, if they apply, and at the best one


def by_surprise(loaded: TrainedLanguageModel, log: ServiceLog) -> dict[str, np.ndarray]:
    """Return z of each line, as `lmlong score --by line` prints it, that of its bits per byte, and that of its bits."""
    lines = list(score(loaded, log.text))
    assert [line.number for line in lines] == list(range(1, len(log.lines) + 1))
    return {
        "z": np.array([np.nan if line.z is None else line.z for line in lines]),
        "bits per byte": _robust(RobustScore(), (line.bits_per_byte or 0.0 for line in lines)),
        "bits": _robust(RobustScore(), (line.bits for line in lines)),
    }


@torch.inference_mode()
def bits_above_entropy(loaded: TrainedLanguageModel, log: ServiceLog) -> np.ndarray:
    """Return by how much the bits of each line exceed their expectation under the model: the sum of -log2 p of its
    tokens minus the entropy of their distributions. What is random in every line, such as an id, adds nothing. A token
    across two lines belongs to the first."""
    model, tokenizer = loaded.model, loaded.tokenizer
    ids = torch.tensor([tokenizer.bos, *tokenizer.encode(log.text)], device=loaded.device)
    state, excess = None, []
    for begin in range(0, len(ids) - 1, PIECE):
        tokens = ids[begin : begin + PIECE + 1]
        hidden, state = model.hidden_states(tokens[None, :-1], state)
        log_p = model.logits(hidden[0]).double().log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        excess.append(-log_p.gather(-1, tokens[1:, None])[:, 0] - entropy)
    sizes = tokenizer.token_bytes[ids[1:].cpu().numpy()]
    ends = np.cumsum([len(line.encode()) + 1 for line in log.lines])
    lines = np.searchsorted(ends, np.cumsum(sizes) - sizes, side="right")
    return np.bincount(lines, torch.cat(excess).cpu().numpy() / math.log(2), minlength=len(ends))


def by_length(log: ServiceLog) -> np.ndarray:
    """Return the distance of each line's length from the median of those before, in robust standard deviations."""
    return np.abs(_robust(RobustScore(), (float(len(line.encode())) for line in log.lines)))


def by_rarity(log: ServiceLog, normal: Iterable[str]) -> np.ndarray:
    """Return -log2 of the share of lines with the same template, among the normal lines and those so far."""
    counts = Counter(map(template, normal))
    total, rarity = sum(counts.values()), []
    for line in log.lines:
        rarity.append(np.log2(total + 1) - np.log2(counts[template(line)] + 1))
        counts[template(line)] += 1
        total += 1
    return np.array(rarity)


def template(line: str) -> str:
    """Return a line with `#` for each number and request id."""
    return MASKED.sub("#", line)


def _robust(scores: RobustScore, values: Iterable[float]) -> np.ndarray:
    return np.array([np.nan if z is None else z for z in map(scores.add, values)])


def compare_methods(
    models: dict[str, TrainedLanguageModel], log: ServiceLog, normal: Sequence[str], above: Sequence[float]
) -> list[Detection]:
    """Return the detections of each model and of the baselines, at thresholds of z and at the best one."""
    detections = []
    for name, loaded in models.items():
        for unit, scores in by_surprise(loaded, log).items():
            detections.append(_detection(f"{name}, {unit}", scores, log, above if unit == "z" else ()))
        detections.append(_detection(f"{name}, above entropy", bits_above_entropy(loaded, log), log, ()))
    detections.append(_detection("length of the line", by_length(log), log, ()))
    detections.append(_detection("rarity of the template", by_rarity(log, normal), log, ()))
    return detections


def _detection(method: str, scores: np.ndarray, log: ServiceLog, above: Sequence[float]) -> Detection:
    curve = curve_of(scores, log.planted)
    return Detection(method, scores, curve, [alarms_above(scores, log.planted, each) for each in (*above, curve.best)])


COLUMNS = [
    Column("method", 28, align="<"),
    Column("above", 9, ".1f"),
    Column("alarms", 8, ","),
    Column("precision", 11, ".2f"),
    Column("recall", 8, ".2f"),
    Column("F1", 6, ".2f"),
    Column("average", 9, ".2f"),
]
KINDS = [Column("recall by kind", 24, align="<"), *(Column(kind.split()[-1], 9, ".2f") for kind in ANOMALIES)]
POINTS = 400
"""Points of a curve in JSON and in the figure, beside those at which the recall changes."""


def table(detections: Sequence[Detection], log: ServiceLog) -> str:
    """Return the alarms of each method at its thresholds, the best one last, and recall by kind at the best one."""
    rows = [
        [each.method if number == 0 else "", *_cells(alarms), each.curve.average_precision if last else None]
        for each in detections
        for number, alarms in enumerate(each.alarms)
        for last in [alarms is each.alarms[-1]]
    ]
    kinds = [[each.method[:24], *(each.alarms[-1].by_kind.get(kind) for kind in ANOMALIES)] for each in detections]
    lines = int(anomalous(len(log.lines), log.planted).sum())
    head = f"{len(log.lines):,} lines, {len(log.planted)} anomalies in {lines} of them"
    return "\n".join([head, "", *format_table(COLUMNS, rows), "", *format_table(KINDS, kinds)])


def _cells(alarms: Any) -> list[Any]:
    return [alarms.above, alarms.alarms, alarms.precision, alarms.recall, alarms.f1]


def to_json(detections: Sequence[Detection], log: ServiceLog) -> dict[str, Any]:
    """Return the planted anomalies, and the results and the curve of each method."""
    methods = [
        {
            "method": each.method,
            "average_precision": each.curve.average_precision,
            "alarms": [
                {**alarms._asdict(), "precision": alarms.precision, "recall": alarms.recall, "f1": alarms.f1}
                for alarms in each.alarms
            ],
            "curve": {"precision": precision, "recall": recall},
        }
        for each in detections
        for precision, recall in [_points(each)]
    ]
    return json_values({"lines": len(log.lines), "planted": log.planted, "methods": methods})


def figure(detections: Sequence[Detection], log: ServiceLog) -> Figure:
    """Return precision against recall of each method, and the scores of the first along the log."""
    curves = [
        Line(each.method, recall, precision, style(number)._replace(marker=None))
        for number, each in enumerate(detections)
        for precision, recall in [_points(each)]
    ]
    against = Panel(curves, "", "recall", "precision", x_range=(0, 1.02), y_range=(0, 1.02), legend=True)
    return Figure([[against], [_along(detections[0], log)]], (11, 9))


def _along(detection: Detection, log: ServiceLog) -> Panel:
    """Return the scores of all normal lines, and the highest score of each anomaly."""
    number_of = np.arange(1, len(log.lines) + 1)
    normal = ~anomalous(len(log.lines), log.planted) & ~np.isnan(detection.scores)
    lines = [Line("normal", number_of[normal], detection.scores[normal], Style("0.6", "", "o", 3, hollow=True))]
    for number, kind in enumerate(ANOMALIES):
        of_kind = [anomaly for anomaly in log.planted if anomaly.kind == kind]
        highest = [float(np.nanmax(detection.scores[anomaly.first - 1 : anomaly.last])) for anomaly in of_kind]
        lines.append(Line(kind, [anomaly.first for anomaly in of_kind], highest, style(number)._replace(dashes="")))
    return Panel(lines, f"{detection.method}: z of each line", "line", "z", legend=True)


def _points(detection: Detection) -> tuple[np.ndarray, np.ndarray]:
    """Return precision and recall at up to POINTS thresholds and wherever the recall changes."""
    curve = detection.curve
    new = np.flatnonzero(np.diff(curve.recall, prepend=0) > 0)
    some = np.linspace(0, len(curve.above) - 1, min(POINTS, len(curve.above))).astype(int)
    kept = np.unique(np.concatenate([new, some]))
    return curve.precision[kept], curve.recall[kept]
