"""Runs that learn labels: every kind of model learns them, from its own start or another run's, resumes exactly, and is
refused where it makes no sense."""

import json
import math
from pathlib import Path

import pytest
import torch
from commands import lmlong
from labelled import KINDS, label_recipe, write_table
from models import write_run
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy

from lmlong.checkpoint import manifest, read
from lmlong.cli.after_training import after_training, next_commands
from lmlong.errors import UsageError
from lmlong.inference.classify import TrainedClassifier
from lmlong.inference.loading import load_classifier
from lmlong.io.folder_manifest import manifest_text
from lmlong.model.base import EMBEDDING_STD
from lmlong.recipe import Recipe
from lmlong.training.optimizer import parameter_groups
from lmlong.training.prepare import prepare_new_run
from lmlong.training.run import train

from .conftest import equal, losses, metrics, weights


def records(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def own_nats(model: TrainedClassifier, held_out: list[dict[str, str]]) -> list[float]:
    """The loss of each document, read alone and whole, by the definition."""
    nats = []
    for each in held_out:
        tokens = torch.tensor([model.tokens_of(each["text"])])
        hidden, _ = model.model(tokens)
        chosen = hidden.mean(1) if model.recipe.is_encoder else hidden[:, -1]
        logits = chosen @ model.model.lm_head.weight.T
        nats.append(float(cross_entropy(logits, torch.tensor([model.labels.index(each["label"])]))))
    return nats


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_learns_labels_and_its_figures_are_true(kind: str, tmp_path: Path) -> None:
    result = train(label_recipe(tmp_path, kind), tmp_path / "run")
    assert losses(tmp_path / "run")[0] == pytest.approx(math.log(2), abs=0.4) and result.validation is not None
    assert result.validation.tokens == 20 and result.validation.accuracy >= 0.9
    model, held_out = load_classifier(tmp_path / "run", "cpu"), records(tmp_path / "held-out.jsonl")
    with torch.no_grad():
        nats = own_nats(model, held_out)
    assert result.validation.nats == pytest.approx(sum(nats), rel=1e-3, abs=1e-5)
    found = [model.classify(each["text"]) for each in held_out]
    assert [each.probabilities[row["label"]] for each, row in zip(found, held_out, strict=True)] == pytest.approx(
        [math.exp(-lost) for lost in nats], rel=1e-4
    )
    manifest = json.loads((model.checkpoint / "manifest.json").read_text())
    assert manifest["validation"] == result.validation.error_rate, "the checkpoint is chosen by its errors"
    correct = sum(each.label == row["label"] for each, row in zip(found, held_out, strict=True))
    assert result.validation.correct == correct
    logged = [line["validation"] for line in metrics(tmp_path / "run") if "validation" in line][-1]
    share = logged["correct"] / 20
    assert (logged["tokens"], logged["bytes"], logged["accuracy"]) == (20, 0, share)
    assert logged["accuracy_error"] == pytest.approx(math.sqrt(share * (1 - share) / 20))
    assert f"accuracy {correct / 20:.3f} ± " in after_training(result)
    assert [command.split()[1] for command in next_commands(result.run, model.recipe)] == ["eval", "serve"]
    assert all("correct" not in line for line in metrics(tmp_path / "run"))


def test_segments_have_the_gradients_of_whole_rows(tmp_path: Path) -> None:
    write_table(tmp_path / "train.jsonl", 32, 1, words=14)
    options = {"training.steps": 4, "text.sequence_length": 40, "training.batch_size": 4}
    for name, more in (("whole", {}), ("cut", {"training.segment": 16})):
        train(label_recipe(tmp_path, "causal", **options, **more), tmp_path / name)
    norms = [
        [line["gradient_norm"] for line in metrics(tmp_path / name) if "loss" in line] for name in ("whole", "cut")
    ]
    assert losses(tmp_path / "cut") == pytest.approx(losses(tmp_path / "whole"), rel=1e-3)
    assert norms[1] == pytest.approx(norms[0], rel=1e-3) and len({f"{norm:.2g}" for norm in norms[0]}) > 1


def test_an_epoch_is_each_document_once(tmp_path: Path) -> None:
    chosen = label_recipe(tmp_path, **{"training.steps": None, "training.epochs": 2})
    assert prepare_new_run(chosen).steps == 2 * 64 // 8


@pytest.mark.parametrize("kind", ["encoder", "causal"])
def test_a_run_resumes_to_the_last_bit(kind: str, tmp_path: Path) -> None:
    options = {"training.steps": 8, "training.checkpoint_every": 3, "text.labels.field": "label"}
    train(label_recipe(tmp_path, kind, **options), tmp_path / "whole")
    train(label_recipe(tmp_path, kind, **options), tmp_path / "cut")
    newest = sorted((tmp_path / "cut" / "checkpoints").glob("step-*"))[0]
    train(label_recipe(tmp_path, kind, **options), tmp_path / "cut", resume=newest)
    assert equal(tmp_path / "whole", tmp_path / "cut")
    with pytest.raises(UsageError, match=r"--resume: text.labels.names: was \['no', 'yes'\] in this run"):
        train(
            label_recipe(tmp_path, kind, **options, **{"text.labels.names": ["yes", "no"]}),
            tmp_path / "cut",
            resume="auto",
        )


STARTS = {"masked": KINDS["encoder"], "causal": KINDS["causal"] | {"tied_output": False}}


@pytest.mark.parametrize("objective", STARTS)
def test_labels_are_learned_from_a_run_of_tokens_and_from_one_of_labels(objective: str, tmp_path: Path) -> None:
    start = {key: value for key, value in STARTS[objective].items() if key != "encoder"}
    values = label_recipe(tmp_path).model_dump(include={"text", "training"})
    values["text"] |= {"labels": None}
    model = {"width": 32, "layers": 2, "heads": 2, **start}
    train(Recipe.load({**values, "objective": objective, "model": model}, {"training.steps": 3}), tmp_path / "start")
    given = {"objective": "label", "text": values["text"] | {"labels": {}}, "training": values["training"]}
    overrides = {"training.init_from": str(tmp_path / "start"), "training.steps": 3}
    chosen = Recipe.load(given, overrides)
    assert chosen.model.encoder == (objective == "masked") and chosen.model.width == 32
    prepared, before = prepare_new_run(chosen), weights(tmp_path / "start")
    begun = prepared.model.state_dict()
    new = {"embedding_growth", *(f"pooled_norm.{name}" for name in ("mean", "variance", "steps"))}
    assert begun.keys() - before.keys() <= {"lm_head.output.weight", *new} and before.keys() <= begun.keys()
    assert all(torch.equal(begun[name], before[name]) for name in before if name != "lm_head.output.weight")
    assert begun["lm_head.output.weight"].shape == (2, 32)
    if objective == "masked":
        size = float(before["embedding.weight"].square().mean().sqrt()) / EMBEDDING_STD
        embedding, head, *_ = parameter_groups(prepared.model, prepared.recipe.training)
        assert size > 1.1 and embedding["lr"] == pytest.approx(size * head["lr"])
        assert embedding["weight_decay"] * embedding["lr"] == pytest.approx(head["weight_decay"] * head["lr"])
    train(chosen, tmp_path / "first")
    again = prepare_new_run(Recipe.load(given, {"training.init_from": str(tmp_path / "first"), "training.steps": 1}))
    first = read.reading(tmp_path / "first", read.read_weights)
    assert all(torch.equal(again.model.state_dict()[name], first[name]) for name in first)
    write_table(tmp_path / "train.jsonl", 30, labels=("no", "yes", "other"))
    three = prepare_new_run(Recipe.load(given, {"training.init_from": str(tmp_path / "first"), "training.steps": 1}))
    assert three.model.state_dict()["lm_head.output.weight"].shape == (3, 32)
    back = Recipe.load(
        {**values, "objective": objective}, {"training.init_from": str(tmp_path / "first"), "model.encoder": False}
    )
    with pytest.raises(
        UsageError, match=r"predicts labels, so it has no output layer of tokens\. Set objective: label"
    ):
        prepare_new_run(back)


def test_encoders_saved_before_means_were_normed_read_as_they_did(tmp_path: Path) -> None:
    train(label_recipe(tmp_path, "encoder", **{"training.steps": 1}), tmp_path / "run")
    checkpoint = read.find(tmp_path / "run")
    kept = {name: x for name, x in read.read_weights(checkpoint).items() if not name.startswith(read.LATER)}
    save_file(kept, checkpoint / manifest.WEIGHTS)
    (checkpoint / manifest.NAME).write_text(manifest_text(checkpoint, manifest.FORMAT, {"step": 1, "validation": None}))
    model = load_classifier(tmp_path / "run", "cpu").model
    hidden = torch.randn(4, 32)
    assert torch.allclose(model.pooled_norm(hidden), hidden, rtol=1e-4) and float(model.embedding_growth) == 1


def test_what_makes_no_sense_with_labels_is_refused_with_the_reason(tmp_path: Path) -> None:
    train(label_recipe(tmp_path, "causal", **{"training.steps": 1}), tmp_path / "run")
    write_run(tmp_path / "causal", objective="causal")
    run, text = tmp_path / "run", tmp_path / "train.jsonl"
    for words in (
        ("generate", run, "--prompt", "x"),
        ("state", "build", run, text, "-o", tmp_path / "x.state"),
        ("check", run),
        ("score", run, text),
        ("eval", run, "--by", "recall"),
    ):
        done = lmlong(*words)
        assert (done.returncode, "a model of labels (objective: label) cannot continue text" in done.stderr) == (
            2,
            True,
        )
    (tmp_path / "new.yaml").write_text("model: {attention: {kind: softmax}}\ntext: {sequence_length: 16}\n")
    for words, why in (
        (("eval", run, "--by", "state"), "predicts the labels of documents"),
        (("eval", run, tmp_path / "causal"), "Name runs of one objective"),
        (("eval", run, "--lengths", "16"), "--lengths: belongs to"),
        (
            ("export", run, "--to", "hf", "--out", tmp_path / "hf"),
            "cannot be exported: it does not predict the next token",
        ),
        (
            ("convert", run, "--to", tmp_path / "new.yaml"),
            "has objective: label, and predicts no next token",
        ),
        (("serve", run, "--port", "0", "--rows", "3"), "--rows: a model of labels writes no text"),
    ):
        done = lmlong(*words)
        assert (done.returncode, why in done.stderr) == (2, True), done.stderr
    with pytest.raises(UsageError, match=r"predicts tokens \(objective: causal\), not labels"):
        load_classifier(tmp_path / "causal")
    teacher = {"training": {"steps": 1, "teacher": str(run)}, "text": {"tokenizer": {"kind": "bytes"}}}
    with pytest.raises(UsageError, match=r"training.teacher: .* predicts labels, not next tokens"):
        prepare_new_run(Recipe.load(teacher))
