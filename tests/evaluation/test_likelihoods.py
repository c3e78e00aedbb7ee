"""The likelihoods of continuations and of documents are those of forward passes, however they are read."""

from pathlib import Path
from typing import Any

import pytest
import torch
from evaluation.harness_models import (
    CHOICES,
    CONTEXTS,
    KINDS,
    by_forward,
    every_kind,
    greedy,
    loaded,
    log_probabilities,
)
from models import FORMS, write_run

from lmlong.evaluation.likelihoods import Pair, document_likelihoods, likelihoods
from lmlong.evaluation.padded_batches import prefill_rows
from lmlong.inference.session import next_logits


@every_kind
def test_continuations_have_the_likelihoods_of_forward_passes_however_they_are_read(tmp_path: Path, form: str) -> None:
    model = write_run(tmp_path / "run", **KINDS[form])
    contexts = [(256, *text.encode()) for text in CONTEXTS]
    pairs = [Pair(context, tuple(choice.encode())) for context in contexts for choice in CHOICES]
    pairs += [Pair(context, tuple(greedy(model, list(context), 3))) for context in contexts]
    expected = [by_forward(model, *map(list, pair)) for pair in pairs]
    assert [is_greedy for _, is_greedy in expected][-4:] == [True] * 4
    assert sum(is_greedy for _, is_greedy in expected) < len(pairs)
    for rows in (None, 3, 1):
        found = dict(likelihoods(model, pairs, rows))
        assert [found[number].is_greedy for number in range(len(pairs))] == [wanted for _, wanted in expected]
        for number, (wanted, _) in enumerate(expected):
            assert found[number].log_probability == pytest.approx(wanted, rel=1e-5, abs=1e-6), pairs[number]


def test_a_long_continuation_is_read_in_pieces(tmp_path: Path) -> None:
    model = write_run(tmp_path / "run", **FORMS["ngram"])
    tokens = list(("abcab" * 900).encode())
    pairs = [Pair((256, 97), tuple(tokens)), Pair((256, 97, 98), tuple(tokens[:2500])), Pair((256,), (97,))]
    for number, found in likelihoods(model, pairs):
        assert found.log_probability == pytest.approx(by_forward(model, *map(list, pairs[number]))[0], rel=1e-5)


def test_a_context_is_read_once_for_all_its_continuations(tmp_path: Path) -> None:
    model = write_run(tmp_path / "run", **FORMS["elu"])
    read = []
    real = model.forward

    def counted(tokens: torch.Tensor, *rest: Any) -> Any:
        read.append(tokens.numel())
        return real(tokens, *rest)

    model.forward = counted  # type: ignore[method-assign]
    context = tuple([256] + [97] * 500)
    list(likelihoods(model, [Pair(context, (98, number)) for number in range(4)]))
    assert read == [501, 4]


def test_a_document_beyond_one_piece_is_read_along_its_state(tmp_path: Path) -> None:
    model = loaded(tmp_path, "delta")
    text = "abcabcabd" * 1000
    (found,) = document_likelihoods(model, [text])
    assert found == pytest.approx(by_forward(model.model, [256], list(text.encode()))[0], rel=1e-5)


@every_kind
def test_rows_of_different_lengths_have_the_logits_of_each_alone(tmp_path: Path, form: str) -> None:
    model = write_run(tmp_path / "run", **KINDS[form])
    rows = [[256, *text.encode()] for text in CONTEXTS]
    for row, session in zip(rows, prefill_rows(model, rows), strict=True):
        found, expected = next_logits(model, session)[0][0], log_probabilities(model, row)[-1]
        torch.testing.assert_close(found.double().log_softmax(-1), expected, rtol=1e-4, atol=1e-4)
