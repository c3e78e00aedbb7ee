"""Models in EleutherAI's lm-evaluation-harness: what plain forward passes say, however requests are read."""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from interop.exported import FORMS, write_run
from interop.tiny_llama import CHAT, CONFIG, weights, write_folder

import lmlong
from lmlong import recipe
from lmlong.checkpoint.location import LATEST
from lmlong.checkpoint.write import Contents, point, write
from lmlong.data.sentencepiece_model import train
from lmlong.data.tokenizer import ByteTokenizer, SentencePieceTokenizer
from lmlong.errors import UsageError
from lmlong.evaluation.likelihoods import Pair, document_likelihoods, likelihoods
from lmlong.inference.loading import TrainedLanguageModel
from lmlong.inference.rows import prefill_rows
from lmlong.inference.session import next_logits
from lmlong.interop.hf.export import export_hf
from lmlong.interop.importing import import_model
from lmlong.model.build import build
from lmlong.model.language_model import LanguageModel
from lmlong.recipe import file as recipe_file

pytestmark = pytest.mark.interop
lm_eval = pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance  # noqa: E402

from lmlong.evaluation.harness import evaluate_tasks, load_tasks, write_tokenizer  # noqa: E402
from lmlong.evaluation.harness_model import HarnessModel, generation_options  # noqa: E402

KINDS = {**FORMS, "hourglass": {"layers": 4, "downsample": recipe.Downsample(factor=4)}}
"""Models of every kind, those too that no other program runs."""

DOCUMENTS = ["abcabcabd" * 30, "a", "", "It was a dark night.\n" * 12, "é\u2581x"]
CONTEXTS = ["", "abc", "It was a dark ", "abcabcabd" * 40]
CHOICES = ["", "night", " cat", "abcabd" * 4, "x"]


def log_probabilities(model: LanguageModel, tokens: list[int]) -> torch.Tensor:
    """Log-probabilities (T, V) of what follows each token, by one forward pass."""
    with torch.inference_mode():
        return model(torch.tensor([tokens]))[0][0].double().log_softmax(-1)


def by_forward(model: LanguageModel, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    found = log_probabilities(model, [*context, *continuation])[len(context) - 1 : -1]
    picked = found[torch.arange(len(continuation)), continuation]
    return float(picked.sum()), found.argmax(-1).tolist() == continuation


def greedy(model: LanguageModel, tokens: list[int], count: int, eos: int | None = None) -> list[int]:
    written: list[int] = []
    while len(written) < count and (not written or written[-1] != eos):
        written.append(int(log_probabilities(model, [*tokens, *written])[-1].argmax()))
    return written


def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Any]:
    return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]  # type: ignore[arg-type]


def loaded(folder: Path, form: str) -> TrainedLanguageModel:
    write_run(folder / "run", **KINDS[form])
    return lmlong.load(folder / "run", "cpu")


@pytest.mark.parametrize("form", KINDS)
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
    real = model.hidden_states

    def counted(tokens: torch.Tensor, *rest: Any) -> Any:
        read.append(tokens.numel())
        return real(tokens, *rest)

    model.hidden_states = counted  # type: ignore[method-assign]
    context = tuple([256] + [97] * 500)
    list(likelihoods(model, [Pair(context, (98, number)) for number in range(4)]))
    assert read == [501, 4]


@pytest.mark.parametrize("form", KINDS)
def test_documents_have_the_likelihoods_of_forward_passes_and_of_lmlong_eval(tmp_path: Path, form: str) -> None:
    model = loaded(tmp_path, form)
    rolling = requests("loglikelihood_rolling", *((text,) for text in DOCUMENTS))
    for score_eos in (False, True):
        found = HarnessModel(model, score_eos=score_eos).loglikelihood_rolling(rolling)
        for text, log_probability in zip(DOCUMENTS, found, strict=True):
            tokens = [*text.encode(), *([257] if score_eos else [])] if text else []
            expected = by_forward(model.model, [256], tokens)[0] if tokens else 0.0
            assert log_probability == pytest.approx(expected, rel=1e-5)
    report = lmlong.evaluate(model, texts=[DOCUMENTS[0]], lengths=[8], views=["protocol"], min_documents=1)
    assert report.carried is not None
    assert -found[0] == pytest.approx(report.carried.nats.sum(), rel=1e-6)


def test_a_document_beyond_one_piece_is_read_along_its_state(tmp_path: Path) -> None:
    model = loaded(tmp_path, "delta")
    text = "abcabcabd" * 1000
    (found,) = document_likelihoods(model, [text])
    assert found == pytest.approx(by_forward(model.model, [256], list(text.encode()))[0], rel=1e-5)


@pytest.mark.parametrize("form", KINDS)
def test_rows_of_any_lengths_go_on_as_each_alone(tmp_path: Path, form: str) -> None:
    model = write_run(tmp_path / "run", **KINDS[form])
    rows = [[256, *text.encode()] for text in CONTEXTS]
    logits, _ = next_logits(model, prefill_rows(model, rows))
    for row, found in zip(rows, logits, strict=True):
        expected = log_probabilities(model, row)[-1]
        torch.testing.assert_close(found.double().log_softmax(-1), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", KINDS)
def test_greedy_text_is_that_of_forward_passes_up_to_its_stop_strings(tmp_path: Path, form: str) -> None:
    model = loaded(tmp_path, form)
    texts = [model.tokenizer.decode(greedy(model.model, [256, *text.encode()], 12, eos=257)) for text in CONTEXTS]
    stop = texts[1][2:4]
    stopped = [text.partition(stop)[0] for text in texts]
    options = {"until": [], "max_gen_toks": 12}
    for given in (model, tmp_path / "run"):  # which decodes by native code
        for batch_size in (None, 1, 3):
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
    [({"top_ks": 3}, "top_ks is none of .* Did you mean 'top_k'"), ({"num_beams": 4}, "no beam")],
)
def test_what_sampling_has_not_is_told(given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        generation_options(given, seed=0)


def test_a_continuation_is_cut_off_where_the_tokens_of_its_context_end(tmp_path: Path) -> None:
    options = recipe.Tokenizer(kind="sentencepiece", vocabulary=300)
    tokenizer = SentencePieceTokenizer(train(["the cat sat on the mat\n" * 50], options), "crossing")
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


@pytest.mark.parametrize("form", ["elu", "delta", "ngram", "softmax", "window beside"])
def test_the_exported_model_has_the_same_likelihoods_in_the_harness(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval.models.huggingface import HFLM
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    ours = HarnessModel(loaded(tmp_path, form))
    export_hf(str(tmp_path / "run"), tmp_path / "hf")
    options: dict[str, Any] = {"pretrained": str(tmp_path / "hf"), "trust_remote_code": True, "device": "cpu"}
    asked = requests("loglikelihood", *((context, choice) for context in CONTEXTS for choice in CHOICES if choice))
    theirs = HFLM(**options, batch_size=3)
    for mine, other in zip(ours.loglikelihood(asked), theirs.loglikelihood(asked, disable_tqdm=True), strict=True):
        assert (mine[0], mine[1]) == (pytest.approx(other[0], rel=1e-5), other[1])
    texts = requests("loglikelihood_rolling", *((text,) for text in DOCUMENTS if text))
    rolled = HFLM(**options, add_bos_token=False).loglikelihood_rolling(texts, disable_tqdm=True)
    assert ours.loglikelihood_rolling(texts) == pytest.approx(rolled, rel=1e-5)


def chat_model(folder: Path) -> HarnessModel:
    import_model(write_folder(folder / "theirs", CONFIG, weights(CONFIG), template=CHAT), folder / "run")
    return HarnessModel(folder / "run", device="cpu")


def test_a_chat_template_makes_the_tokens_of_a_conversation(tmp_path: Path) -> None:
    model = chat_model(tmp_path)
    bos, eos, encode = model.tokenizer.bos, model.tokenizer.eos, model.tokenizer.encode
    said = [{"role": "user", "content": "The </s> quick"}]
    asked = [bos, *encode("[user]The </s> quick"), eos, *encode("\n[assistant]")]
    assert model.tokens(model.apply_chat_template(said)) == asked
    begun = [*said, {"role": "assistant", "content": "fox"}]
    assert model.tokens(model.apply_chat_template(begun, add_generation_prompt=False)) == [
        *asked[: -len(encode("\n[assistant]"))],
        *encode("\n[assistant]fox"),
    ]
    pair = model.pair(model.apply_chat_template(said), " jumps <s>")
    assert model.tokenizer.decode(pair.continuation) == " jumps <s>"
    assert [*pair.context, *pair.continuation].count(bos) == 1
    assert model.chat_template(True) == CHAT


def test_transformers_counts_the_tokens_of_the_run(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    write_tokenizer(ByteTokenizer(), tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=True)
    assert tokenizer("abcé").input_ids == [256, *"abcé".encode()]


def write_tasks(folder: Path) -> Path:
    """Three tasks of one's own, each with its documents."""
    tasks = folder / "tasks"
    tasks.mkdir()
    questions = [{"q": f"abc{letter}", "choices": ["a", "bcab", " x"], "answer": 1} for letter in "abcd"]
    rows = {"documents": [{"text": text} for text in DOCUMENTS if text], "choices": questions, "written": questions}
    spec = {
        "documents": "loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'",
        "choices": "multiple_choice\ndoc_to_text: '{{q}}'\ndoc_to_choice: '{{choices}}'\ndoc_to_target: answer",
        "written": "generate_until\ndoc_to_text: '{{q}}'\ndoc_to_target: '{{q}}'\n"
        "generation_kwargs: {until: [b], max_gen_toks: 6}",
    }
    metrics = {"documents": "bits_per_byte", "choices": "acc", "written": "exact_match"}
    for name, text in spec.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
        (tasks / f"{name}.yaml").write_text(
            f"task: my_{name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: '{data}'}}}}\n"
            f"test_split: test\ntarget_delimiter: ''\noutput_type: {text}\nmetric_list: [{{metric: {metrics[name]}}}]\n"
        )
    (tasks / "of_lengths.py").write_text(OF_LENGTHS)
    (tasks / "of_lengths.yaml").write_text(
        "task: my_lengths\ndataset_path: ''\ncustom_dataset: !function of_lengths.make\ntest_split: test\n"
        "output_type: generate_until\ndoc_to_text: '{{text}}'\ndoc_to_target: '{{tokens}}'\n"
        "generation_kwargs: {until: [], max_gen_toks: 1}\nmetric_list: [{metric: exact_match}]\n"
    )
    return tasks


OF_LENGTHS = """
from datasets import Dataset
from transformers import AutoTokenizer


def make(tokenizer, max_seq_lengths, **_):
    count = AutoTokenizer.from_pretrained(tokenizer)
    texts = ["x" * (length - 1) for length in max_seq_lengths]
    return {"test": Dataset.from_list([{"text": text, "tokens": len(count(text).input_ids)} for text in texts])}
"""
"""A task that makes texts of the lengths that it is asked for, as RULER's do."""


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"HF_DATASETS_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}.items():
        monkeypatch.setenv(name, value)


def test_the_commands_of_both_programs_run_tasks(tmp_path: Path, offline: None) -> None:
    model, tasks = loaded(tmp_path, "elu"), write_tasks(tmp_path)
    words = [sys.executable, "-m", "lmlong", "lm-eval", "run", "--tasks", "my_*", "--include-path", str(tasks)]
    words += ["--lengths", "16,1k", "--json", "told.json"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("|   Tasks    |Version|") and len(lines) == 6
    assert max(map(len, lines)) <= 80
    found = json.loads((tmp_path / "told.json").read_text())
    texts = [text for text in DOCUMENTS if text]
    bits = -sum(document_likelihoods(model, texts)) / torch.tensor(2.0).log() / sum(len(t.encode()) for t in texts)
    told = {task: next(value for key, value in each.items() if "," in key) for task, each in found["results"].items()}
    assert told["my_documents"] == pytest.approx(float(bits), rel=1e-6)
    right = [
        max(range(3), key=lambda n: by_forward(model.model, [256, *f"abc{q}".encode()], list(choices[n].encode()))[0])
        for q in "abcd"
        for choices in [["a", "bcab", " x"]]
    ]
    assert told["my_choices"] == right.count(1) / 4
    assert told["my_written"] == 0
    assert {task: each["effective"] for task, each in found["n-samples"].items()} == {
        "my_documents": len(texts),
        "my_choices": 4,
        "my_written": 4,
        "my_lengths": 2,
    }
    assert (found["config"]["model"], found["config"]["checkpoint"]) == ("lmlong", str(model.checkpoint))

    words = [sys.executable, "-m", "lmlong.evaluation.harness", "run", "--model", "lmlong", "--model_args", "run=run"]
    words += ["--tasks", "my_documents,my_choices", "--include_path", str(tasks), "--output_path", "out"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "out").rglob("results*.json")
    theirs = json.loads(file.read_text())["results"]
    assert theirs["my_documents"]["bits_per_byte,none"] == told["my_documents"]
    assert theirs["my_choices"]["acc,none"] == told["my_choices"]


def test_mistakes_are_told(tmp_path: Path, offline: None) -> None:
    model, tasks = loaded(tmp_path, "elu"), write_tasks(tmp_path)
    (tmp_path / "choices.jsonl").unlink()
    for names, options, complaint in [
        (["my_documents"], {"limit": 0}, "--limit: 0"),
        (["my_documents"], {"batch_size": 0}, "batch_size: 0"),
        (["my_documents"], {"include_path": tmp_path / "none"}, "is no folder"),
        (["my_document"], {}, "no 'my_document'. Did you mean 'my_documents'?"),
        (["my_choices"], {}, r"my_choices cannot be loaded \(.*choices.jsonl"),
    ]:
        with pytest.raises(UsageError, match=complaint):
            evaluate_tasks(model, names, **{"include_path": tasks, **options})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="has no chat template"):
        HarnessModel(model).apply_chat_template([{"role": "user", "content": "Hello"}])
    assert [task.config.task for task in load_tasks([str(tasks / "documents.yaml")], None, {})] == ["my_documents"]


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from lmlong.cli.lm_eval import lm_eval as command

    chosen = recipe.Recipe(
        objective="masked",
        model=recipe.Model(
            width=32, layers=2, heads=4, convolution=0, attention=recipe.Attention(kind="linear", decay="none")
        ),
        text=recipe.Text(),
    )
    encoder, tokenizer = build(chosen, ByteTokenizer().vocabulary), ByteTokenizer()
    folder = tmp_path / "run" / "checkpoints" / "step-00000001"
    write(folder, Contents(encoder.state_dict(), {"step": 1}, recipe_file.dump(chosen), tokenizer.file, 1))
    point(folder.parent / LATEST, folder)
    result = CliRunner().invoke(command, [str(tmp_path / "run"), "--tasks", "arc_easy"])
    assert isinstance(result.exception, UsageError) and "encoder (objective: masked)" in str(result.exception)


def test_a_missing_harness_is_told(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    code = "import sys; sys.modules['lm_eval'] = None; from lmlong.cli.main import main; main()"
    words = [sys.executable, "-c", code, "lm-eval", str(tmp_path / "run"), "--tasks", "arc_easy"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: lm-eval: is not installed. Install it by pip install 'lmlong[lm-eval]'.\n"
