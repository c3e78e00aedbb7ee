"""The likelihoods and texts that the harness asks for; test_likelihoods.py has those of every kind of model."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from evaluation.harness_models import (
    CHOICES,
    CONTEXTS,
    DOCUMENTS,
    USUAL,
    greedy,
    loaded,
    requests,
)
from models import write_run

import lmlong
from lmlong import recipe
from lmlong.data.tokenizers.sentencepiece import SentencePieceTokenizer, train_sentencepiece
from lmlong.decode.choice import why_no_fast_engine
from lmlong.decode.engine import EagerEngine
from lmlong.errors import UsageError
from lmlong.interop.hf.export import export_hf

pytestmark = pytest.mark.interop
pytest.importorskip("lm_eval")

from lmlong.evaluation.harness_model import HarnessModel, generation_options  # noqa: E402


def test_a_continuation_is_cut_off_where_the_tokens_of_its_context_end(tmp_path: Path) -> None:
    options = recipe.Tokenizer(kind="sentencepiece", vocabulary=300)
    tokenizer = SentencePieceTokenizer(train_sentencepiece(["the cat sat on the mat\n" * 50], options), "crossing")
    write_run(tmp_path / "run", tokenizer)
    model = HarnessModel(tmp_path / "run", device="cpu")
    crossing = 0
    for context, continuation in [("the cat", " sat"), ("the cat ", "on"), ("the ca", "t"), ("", "mat"), ("on\n", "q")]:
        pair = model.pair(context, continuation)
        before, after = tokenizer.encode(context.rstrip()), tokenizer.encode(context + continuation)
        assert [*pair.context, *pair.continuation] == [tokenizer.bos, *after]
        assert tokenizer.decode(pair.continuation).endswith(continuation)
        if after[: len(before)] == before:  # as the harness has it for models of transformers
            assert list(pair.continuation) == after[len(before) :]
        else:
            crossing += 1
            assert len(pair.context) <= len(before)
    assert crossing


def test_likelihoods_are_those_of_the_exported_model_in_the_harness_and_of_lmlong_eval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval.models.huggingface import HFLM
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    model = loaded(tmp_path, "elu")
    ours = HarnessModel(model)
    export_hf(str(tmp_path / "run"), tmp_path / "hf")
    options: dict[str, Any] = {"pretrained": str(tmp_path / "hf"), "trust_remote_code": True, "device": "cpu"}
    asked = requests("loglikelihood", *((context, choice) for context in CONTEXTS for choice in CHOICES if choice))
    theirs = HFLM(**options, batch_size=3)
    for mine, other in zip(ours.loglikelihood(asked), theirs.loglikelihood(asked, disable_tqdm=True), strict=True):
        assert (mine[0], mine[1]) == (pytest.approx(other[0], rel=1e-5), other[1])
    texts = requests("loglikelihood_rolling", *((text,) for text in DOCUMENTS if text))
    rolled = HFLM(**options, add_bos_token=False).loglikelihood_rolling(texts, disable_tqdm=True)
    assert ours.loglikelihood_rolling(texts) == pytest.approx(rolled, rel=1e-5)

    to_end, *_ = HarnessModel(model, score_eos=True).loglikelihood_rolling(texts)
    report = lmlong.evaluate(model, texts=[DOCUMENTS[0]], lengths=[8], views=["position"], min_documents=1)
    assert report.carried is not None
    assert -to_end == pytest.approx(report.carried.nats.sum(), rel=1e-6)


@pytest.mark.parametrize("form", USUAL)
def test_greedy_text_is_that_of_forward_passes_up_to_its_stop_strings(tmp_path: Path, form: str) -> None:
    model = loaded(tmp_path, form)
    texts = [model.tokenizer.decode(greedy(model.model, [256, *text.encode()], 12, eos=257)) for text in CONTEXTS]
    stop = texts[1][2:4]
    stopped = [text.partition(stop)[0] for text in texts]
    options = {"until": [], "max_gen_toks": 12}
    for given in (model, tmp_path / "run"):
        for batch_size in (1, 3):
            ours = HarnessModel(given, device="cpu", batch_size=batch_size)
            assert ours.generate_until(requests("generate_until", *((text, options) for text in CONTEXTS))) == texts
            both = [(text, {**options, "until": ["", stop]}) for text in CONTEXTS]
            assert ours.generate_until(requests("generate_until", *both)) == stopped
    assert isinstance(ours.loaded.model.engine, EagerEngine) == bool(why_no_fast_engine(ours.loaded.model))


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
    assert (max_tokens, stop, sampling.ignore_eos) == (256, ["\n"], False)


def test_unknown_sampling_options_are_refused() -> None:
    with pytest.raises(UsageError, match=r"top_ks is not one of .* Did you mean 'top_k'"):
        generation_options({"top_ks": 3}, seed=0)
    with pytest.raises(UsageError, match="beam search is not supported"):
        generation_options({"num_beams": 4}, seed=0)
