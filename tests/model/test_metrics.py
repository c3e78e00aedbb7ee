"""LossTotals, and the scoring of batches in pieces."""

import math

import torch

from lmlong import recipe
from lmlong.model import language_model, metrics
from lmlong.model.language_model import LanguageModel
from lmlong.model.loss import IGNORED
from lmlong.model.metrics import LossTotals
from lmlong.model.segments import text_loss


def test_ratios_are_taken_once_from_sums() -> None:
    totals = LossTotals(nats=6.0, tokens=4, bytes=8) + LossTotals(nats=2.0, tokens=4, bytes=2)
    assert totals.nats_per_token == 1.0
    assert totals.perplexity == math.e
    assert math.isclose(totals.bits_per_byte, 8 / math.log(2) / 10)


def test_ratios_of_no_targets_are_nan() -> None:
    assert math.isnan(LossTotals().nats_per_token) and math.isnan(LossTotals().bits_per_byte)


def test_long_rows_read_in_pieces_score_what_they_score_whole(monkeypatch) -> None:
    model = LanguageModel(
        recipe.Model(width=16, layers=2, heads=2, attention=recipe.Attention(kind="linear")), 20
    ).double()
    tokens = torch.randint(20, (3, 90))
    targets = tokens.roll(-1, 1)
    targets[1, 4] = IGNORED
    starts = torch.rand(3, 90) < 0.05
    token_bytes = torch.arange(20)
    whole = metrics.loss_totals(model, [(tokens, targets, starts)], token_bytes)
    monkeypatch.setattr(language_model, "PIECE", 17)
    pieces = metrics.loss_totals(model, [(tokens, targets, starts)], token_bytes)
    nats, _ = text_loss(model, tokens, targets, starts)
    assert math.isclose(whole.nats, nats.item(), rel_tol=1e-12)
    assert math.isclose(pieces.nats, whole.nats, rel_tol=1e-12)
    assert whole.tokens == pieces.tokens == 269
    assert whole.bytes == pieces.bytes == int(targets[targets != IGNORED].sum())
