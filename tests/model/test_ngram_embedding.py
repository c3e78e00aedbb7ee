"""Tables of n-grams: a text gives the same however it is cut, and the gradients of rows are those of a dense table."""

from typing import Any

import pytest
import torch
from models import stirred
from torch import Tensor
from torch.nn.functional import linear

from lmlong import recipe
from lmlong.attention.ngram.hashing import ngram_hashes, row_of
from lmlong.model import ngram_embedding
from lmlong.model.base import count_parameters
from lmlong.model.language_model import LanguageModel
from lmlong.model.ngram_embedding import NgramEmbedding, RowGradients
from lmlong.model.segments import text_loss

VOCABULARY, ROWS, TIME = 11, 13, 40


def build(orders: list[int] | None = None, **options: Any) -> LanguageModel:
    tables = recipe.NgramEmbedding(orders=orders or [2, 3], rows=ROWS, width=4)
    shape = {"width": 16, "layers": 2, "heads": 2, "attention": recipe.Attention(kind="linear"), **options}
    return stirred(LanguageModel(recipe.Model(ngram_embedding=tables, **shape), VOCABULARY), 0.3).double()


def tables_of(model: LanguageModel) -> NgramEmbedding:
    assert model.ngram_embedding is not None
    return model.ngram_embedding


def trained(model: LanguageModel, reads_values: bool = True) -> RowGradients:
    """Let the backward pass collect the gradients of rows."""
    tables = tables_of(model)
    tables.gradients = RowGradients(len(tables.table), reads_values)
    return tables.gradients


def text(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens, and document starts of which some follow each other at once."""
    draw = torch.Generator().manual_seed(seed)
    starts = torch.zeros(2, TIME, dtype=torch.bool)
    starts[0, [0, 1, 2, 4, 17, 30]] = starts[1, 20] = True
    return torch.randint(VOCABULARY, (2, TIME), generator=draw), starts


def by_definition(tables: NgramEmbedding, table: Tensor, tokens: Tensor, starts: Tensor) -> Tensor:
    """The vectors (B, T, width), token by token."""
    rows = []
    for row, starts_of_row in zip(tokens, starts, strict=True):
        document: list[int] = []
        for token, begins in zip(row.tolist(), starts_of_row.tolist(), strict=True):
            document = [token] if begins else [*document, token]
            found = []
            for number, n in enumerate(tables.orders):
                if len(document) < n:
                    found.append(torch.zeros_like(table[0]))
                    continue
                ngram = torch.tensor([[[-1, *document[-n:]]]])
                found.append(
                    table[number * tables.rows + int(row_of(ngram_hashes(ngram, [n])[0, 0, 0, 1], tables.rows))]
                )
            rows.append(torch.cat(found))
    return linear(torch.stack(rows).unflatten(0, tokens.shape), tables.projection.weight)


def test_an_order_that_reaches_before_its_document_finds_no_row() -> None:
    model, (tokens, starts) = build(), text()
    tables = tables_of(model)
    x, _ = model.embed(tokens, model.init_state(2), starts)
    plain = model.embedding(tokens) * model.embedding_scale
    expected = by_definition(tables, tables.table, tokens, starts)
    assert torch.allclose(x - plain, expected, atol=1e-12) and not expected[0, :2].any() and expected[0, 3].any()


@pytest.mark.parametrize(
    ("reads_values", "segment", "joined_at"),
    [(True, None, 1 << 17), (True, 7, 50), (False, 7, 1 << 17), (False, None, 50)],
)
def test_gradients_of_rows_are_those_of_a_dense_table(
    monkeypatch: pytest.MonkeyPatch, reads_values: bool, segment: int | None, joined_at: int
) -> None:
    """Of two batches, whose losses are scaled differently."""
    monkeypatch.setattr(ngram_embedding, "JOINED_AT", joined_at)
    model = build()
    gradients, tables = trained(model, reads_values), tables_of(model)
    dense = tables.table.clone().requires_grad_()
    for scale, (tokens, starts) in ((0.5, text(0)), (3.0, text(1))):
        loss, _ = text_loss(model, tokens, tokens.roll(-1, 1), starts, segment=segment)
        (scale * loss).backward()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tables, "forward", lambda _, x=(tokens, starts): by_definition(tables, dense, *x))
            (scale * text_loss(model, tokens, tokens.roll(-1, 1), starts)[0]).backward()
    rows, gradient = gradients.take()
    found = torch.zeros_like(dense).index_add_(0, rows, gradient)
    assert dense.grad is not None and torch.allclose(found, dense.grad, atol=1e-10)
    if reads_values:
        assert len(rows.unique()) == len(rows) <= len(dense)
    assert not gradients.pieces and tables.gradients is gradients


def test_only_a_backward_pass_leaves_gradients() -> None:
    model, (tokens, starts) = build(), text()
    gradients = trained(model)
    with torch.no_grad():
        text_loss(model, tokens, tokens, starts)
    text_loss(model, tokens, tokens, starts, segment=7)
    assert not gradients.pieces
    tables_of(model).projection.requires_grad_(False)
    text_loss(model, tokens, tokens, starts)[0].backward()
    assert not gradients.pieces


def test_the_weights_of_tables_count_as_parameters() -> None:
    shape = {"width": 16, "layers": 1, "heads": 2}
    plain, model = (LanguageModel(recipe.Model(**shape, ngram_embedding=x), 9) for x in (None, recipe.NgramEmbedding()))
    added = 2 * 65536 * 64 + 2 * 64 * 16
    assert count_parameters(model) - count_parameters(plain) == added
    assert not tables_of(model).table.any() and "ngram_embedding.table" in model.state_dict()
