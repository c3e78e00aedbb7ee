"""Texts that the harness asks for are those of forward passes."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from evaluation.harness_models import CONTEXTS, KINDS, every_kind, greedy, loaded, log_probabilities, requests
from interop.exported import write_run

from lmlong.errors import UsageError
from lmlong.inference.rows import prefill_rows
from lmlong.inference.session import next_logits

pytestmark = pytest.mark.interop
pytest.importorskip("lm_eval")

from lmlong.evaluation.harness_model import HarnessModel, generation_options  # noqa: E402


@every_kind
def test_rows_of_any_lengths_go_on_as_each_alone(tmp_path: Path, form: str) -> None:
    model = write_run(tmp_path / "run", **KINDS[form])
    rows = [[256, *text.encode()] for text in CONTEXTS]
    logits, _ = next_logits(model, prefill_rows(model, rows))
    for row, found in zip(rows, logits, strict=True):
        expected = log_probabilities(model, row)[-1]
        torch.testing.assert_close(found.double().log_softmax(-1), expected, rtol=1e-4, atol=1e-4)


@every_kind
def test_greedy_text_is_that_of_forward_passes_up_to_its_stop_strings(tmp_path: Path, form: str) -> None:
    model = loaded(tmp_path, form)
    texts = [model.tokenizer.decode(greedy(model.model, [256, *text.encode()], 12, eos=257)) for text in CONTEXTS]
    stop = texts[1][2:4]
    stopped = [text.partition(stop)[0] for text in texts]
    options = {"until": [], "max_gen_toks": 12}
    for given in (model, tmp_path / "run"):  # which decodes by native code
        for batch_size in (1, 3):
            ours = HarnessModel(given, device="cpu", batch_size=batch_size)
            assert ours.generate_until(requests("generate_until", *((text, options) for text in CONTEXTS))) == texts
            both = [(text, {**options, "until": ["", stop]}) for text in CONTEXTS]
            assert ours.generate_until(requests("generate_until", *both)) == stopped
    assert (ours.loaded.model.fast_step is not None) == ours.loaded.fast_step_at_once


def test_a_document_that_ends_ends_the_text(tmp_path: Path) -> None:
    model = loaded(tmp_path, "elu")
    with torch.no_grad():
        model.model.embedding.weight[257] = 5 * model.model.embedding.weight.mean(0)
        hidden, _ = model.model.hidden_states(torch.tensor([[256, 97]]))
        model.model.embedding.weight[257] = 10 * hidden[0, -1]
    found = HarnessModel(model).generate_until(requests("generate_until", ("a", {"until": [], "max_gen_toks": 5})))
    assert found == [""]


def test_draws_follow_from_the_seed_and_the_request_not_from_the_batch(tmp_path: Path) -> None:
    model = loaded(tmp_path, "elu")
    options = {"until": [], "max_gen_toks": 20, "do_sample": True, "temperature": 1.0}
    asked = requests("generate_until", ("abc", options), ("abc", options), ("", options))
    found = {
        seed: [HarnessModel(model, seed=seed, batch_size=rows).generate_until(asked) for rows in (None, 1, 2)]
        for seed in (0, 1)
    }
    assert all(one == other for batches in found.values() for one, other in pairwise(batches))
    assert found[0][0] != found[1][0]
    assert found[0][0][0] != found[0][0][1]


@pytest.mark.parametrize(
    ("given", "temperature"),
    [
        ({}, 0.0),
        ({"temperature": 0.7}, 0.7),
        ({"do_sample": False, "temperature": 0.7}, 0.0),
        ({"do_sample": True}, 1.0),
        ({"do_sample": True, "temperature": 0.5, "top_k": 0, "num_beams": 1}, 0.5),
    ],
)
def test_sampling_is_what_a_task_asks_for(given: dict[str, Any], temperature: float) -> None:
    sampling, max_tokens, stop = generation_options({**given, "until": "\n"}, seed=3)
    assert (sampling.temperature, sampling.top_k, sampling.seed) == (temperature, None, 3)
    assert (max_tokens, stop) == (256, ["\n"])


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"top_ks": 3}, "top_ks is not one of .* Did you mean 'top_k'"),
        ({"num_beams": 4}, "beam search is not supported"),
    ],
)
def test_what_sampling_has_not_is_told(given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        generation_options(given, seed=0)
