"""Whole tasks of one's own, by the commands of both programs, and what is told of mistakes."""

import json
import sys
from functools import partialmethod
from pathlib import Path
from runpy import run_module

import pytest
import torch
from commands import lmlong
from evaluation.harness_models import DOCUMENTS, by_forward, loaded
from interop.tiny_llama import CHAT, CONFIG, weights, write_folder
from models import write_run

from lmlong.errors import UsageError
from lmlong.evaluation.likelihoods import document_likelihoods
from lmlong.interop.importing import import_model

pytestmark = pytest.mark.interop
pytest.importorskip("lm_eval")

from lm_eval.tasks import TaskManager  # noqa: E402

from lmlong.evaluation.harness import evaluate_tasks  # noqa: E402
from lmlong.evaluation.harness_model import HarnessModel  # noqa: E402


def test_a_chat_template_makes_the_tokens_of_a_conversation(tmp_path: Path) -> None:
    import_model(write_folder(tmp_path / "theirs", CONFIG, weights(CONFIG), template=CHAT), tmp_path / "run")
    model = HarnessModel(tmp_path / "run", device="cpu")
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


CHOICES = ["a", "bcab", " x"]


def write_tasks(folder: Path) -> Path:
    """Tasks of one's own, each with its documents."""
    tasks = folder / "tasks"
    tasks.mkdir()
    questions = [{"q": f"abc{letter}", "choices": CHOICES, "answer": 1} for letter in "abcd"]
    rows = {"documents": [{"text": text} for text in DOCUMENTS if text], "choices": questions}
    spec = {
        "documents": "loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'",
        "choices": "multiple_choice\ndoc_to_text: '{{q}}'\ndoc_to_choice: '{{choices}}'\ndoc_to_target: answer",
    }
    metrics = {"documents": "bits_per_byte", "choices": "acc"}
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
    """No downloads, and only tasks of one's own: the index of all tasks of the harness takes many seconds."""
    for name, value in {"HF_DATASETS_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(TaskManager, "__init__", partialmethod(TaskManager.__init__, include_defaults=False))


def test_the_commands_of_both_programs_run_tasks(
    tmp_path: Path, offline: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tasks = loaded(tmp_path, "elu"), write_tasks(tmp_path)
    names = ",".join(map(str, sorted(tasks.glob("*.yaml"))))
    done = lmlong("eval", "run", "--tasks", names, "--lengths", "16,1k", "--json", "told.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("|   Tasks    |Version|") and len(lines) == 5
    assert max(map(len, lines)) <= 80
    found = json.loads((tmp_path / "told.json").read_text())
    texts = [text for text in DOCUMENTS if text]
    bits = -sum(document_likelihoods(model, texts)) / torch.tensor(2.0).log() / sum(len(t.encode()) for t in texts)
    told = {task: next(value for key, value in each.items() if "," in key) for task, each in found["results"].items()}
    assert told["my_documents"] == pytest.approx(float(bits), rel=1e-6)
    right = 0
    for question in ("abca", "abcb", "abcc", "abcd"):
        context = [256, *question.encode()]
        scores = [by_forward(model.model, context, list(choice.encode()))[0] for choice in CHOICES]
        right += scores.index(max(scores)) == 1
    assert told["my_choices"] == right / 4
    counts = {task: each["effective"] for task, each in found["n-samples"].items()}
    assert counts == {"my_documents": len(texts), "my_choices": 4, "my_lengths": 2}
    assert (found["config"]["model"], found["config"]["checkpoint"]) == ("lmlong", str(model.checkpoint))

    words = ["harness", "run", "--model", "lmlong", "--model_args", "run=run", "--tasks", "my_documents,my_choices"]
    words += ["--include_path", str(tasks), "--output_path", "out"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.delitem(sys.modules, "lmlong.evaluation.harness")
    run_module("lmlong.evaluation.harness", run_name="__main__")  # python -m
    (file,) = (tmp_path / "out").rglob("results*.json")
    theirs = json.loads(file.read_text())["results"]
    assert theirs["my_documents"]["bits_per_byte,none"] == told["my_documents"]
    assert theirs["my_choices"]["acc,none"] == told["my_choices"]


def test_mistakes_are_usage_errors(tmp_path: Path, offline: None) -> None:
    model, tasks = loaded(tmp_path, "elu"), write_tasks(tmp_path)
    (tmp_path / "choices.jsonl").unlink()
    for names, options, complaint in [
        (["my_documents"], {"limit": 0}, "--limit: 0"),
        (["my_documents"], {"include_path": tmp_path / "none"}, "is not a folder"),
        (["my_document"], {}, "no 'my_document'. Did you mean 'my_documents'?"),
        (["my_choices"], {}, r"my_choices cannot be loaded \(.*choices.jsonl"),
    ]:
        with pytest.raises(UsageError, match=complaint):
            evaluate_tasks(model, names, **{"include_path": tasks, **options})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="has no chat template"):
        HarnessModel(model).apply_chat_template([{"role": "user", "content": "Hello"}])
    encoder = {"attention": {"kind": "linear", "decay": "none"}, "convolution": 0}
    write_run(tmp_path / "encoder", objective="masked", deviation=0.3, **encoder)
    done = lmlong("eval", tmp_path / "encoder", "--tasks", "arc_easy")
    assert done.returncode == 2 and "encoder (objective: masked)" in done.stderr


def test_a_missing_harness_is_a_usage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    done = lmlong("eval", tmp_path / "run", "--tasks", "arc_easy")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: lm-eval is not installed. Run pip install -e '.[lm-eval]' in the folder")
