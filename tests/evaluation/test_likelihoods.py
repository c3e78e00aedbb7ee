"""The likelihoods of continuations and of documents are those of forward passes, however they are read."""

from pathlib import Path
from typing import Any

import pytest
import torch
from evaluation.harness_models import (
    CHOICES,
    CONTEXTS,
    DOCUMENTS,
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
def test_likelihoods_are_those_of_forward_passes_however_texts_are_read(tmp_path: Path, form: str) -> None:
    trained = loaded(tmp_path, form)
    model = trained.model
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

    for score_eos in (False, True):
        documents = document_likelihoods(trained, DOCUMENTS, score_eos=score_eos, show=False)
        for text, log_probability in zip(DOCUMENTS, documents, strict=True):
            tokens = [*text.encode(), *([257] if score_eos else [])] if text else []
            wanted = by_forward(model, [256], tokens)[0] if tokens else 0.0
            assert log_probability == pytest.approx(wanted, rel=1e-5)

    for context, session in zip(contexts, prefill_rows(model, contexts), strict=True):
        logits = next_logits(model, session)[0][0].double()
        after = log_probabilities(model, list(context))[-1]
        torch.testing.assert_close(logits.log_softmax(-1), after, rtol=1e-4, atol=1e-4)


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
