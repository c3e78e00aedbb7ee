"""Whole runs of tiny models, causal ones and encoders: they learn, and what they report is true."""

import math
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from wrong_kernel import WrongDk

from lmlong.attention.linear.chunk import ChunkKernel
from lmlong.attention.linear.layer import LinearAttention
from lmlong.checkpoint import manifest, read
from lmlong.cli.after_training import after_training
from lmlong.data.batches import scored_tokens, validation_batches
from lmlong.errors import CheckpointError, UsageError
from lmlong.inference.loading import load, open_run
from lmlong.model.metrics import batch_tensors, loss_totals
from lmlong.training import callbacks
from lmlong.training.prepare import prepare_run
from lmlong.training.resume import resume_point
from lmlong.training.run import train

from .conftest import SOFTMAX, Recipes, checkpoint_at, copied, losses, metrics, weights


def test_run_learns_and_reports_its_weights(recipe_of: Recipes, tmp_path: Path) -> None:
    result, run = train(recipe_of("training.steps=40"), tmp_path / "run"), tmp_path / "run"
    assert result.step == 40 and result.signal is None and result.validation is not None
    first, last = losses(run)[0], losses(run)[-1]
    assert first > 5.4 and last < 2.5  # ln 258 = 5.55; the text's own letters alone give about 2.8
    written = {"recipe.yaml", "environment.json", "metrics.jsonl", "tokenizer.model", "checkpoints"}
    assert {path.name for path in run.iterdir()} == written

    setup = prepare_run(recipe_of(), read.find(run))
    tokens = setup.tokens
    text = scored_tokens(tokens.validation.tokens, tokens.tokenizer.bos, tokens.tokenizer.eos)
    batches = (batch_tensors(batch) for batch in validation_batches(text, 64, 3))
    again = loss_totals(setup.model.eval(), batches, torch.from_numpy(tokens.tokenizer.token_bytes))
    assert again.nats == pytest.approx(result.validation.nats, rel=1e-6)
    assert again.bytes == result.validation.bytes == len(tokens.tokenizer.decode_bytes(tokens.validation.tokens))
    assert metrics(run)[-1]["validation"]["bits_per_byte"] == result.validation.bits_per_byte


def test_a_short_step_has_the_gradient_of_as_many_tokens(recipe_of: Recipes, tmp_path: Path) -> None:
    """A step of parts of rows, and one of whole rows of that length and of whole rows, from the same weights."""
    shapes = [(256, 2, 1), (64, 8, 0), (256, 2, 0)]
    for length, rows, short in shapes:
        options = f"text.sequence_length={length}", f"training.batch_size={rows}", f"text.short_steps={short}"
        train(recipe_of("training.steps=1", *options), tmp_path / f"{length}-{short}")
    short, *others = (metrics(tmp_path / f"{length}-{short}")[0] for length, _, short in shapes)
    for other in others:
        assert short["gradient_norm"] == pytest.approx(other["gradient_norm"], rel=0.5)
        assert short["loss"] == pytest.approx(other["loss"], rel=0.05)


def test_utilisation_is_logged_where_the_peak_is_known(
    recipe_of: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """6 operations a token for each weight of a matrix: q, k, v, gate and output, three of the MLP, the logits."""
    monkeypatch.setattr(callbacks, "peak_operations", lambda device: 1e12)
    recipe = recipe_of("training.steps=2")
    train(recipe, tmp_path / "run")
    model = recipe.model
    width, inner, layers = model.width, model.inner_width, model.layers
    attention = 5 * width**2 + width * model.heads  # and the forget gate
    operations = 6 * (layers * (attention + 3 * width * inner) + 258 * width)
    logged = [line for line in metrics(tmp_path / "run") if "mfu" in line]
    assert len(logged) == 2
    for line in logged:
        assert line["mfu"] == pytest.approx(line["tokens_per_second"] * operations / 1e12, rel=0.01)


def test_best_is_chosen_by_a_sample_and_all_text_is_scored(
    recipe_of: Recipes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("training.validation_tokens=200", "training.checkpoint_every=6", "training.sample_tokens=9")
    outcome, lines = train(recipe_of(*options), tmp_path / "run"), metrics(tmp_path / "run")
    written = {line["step"]: line["sample"] for line in lines if "sample" in line}
    assert written.keys() == {6, 12} and all(written.values()) and capsys.readouterr().err.count("a sample") == 2
    samples = [line["validation"] for line in lines if "validation" in line]
    (whole,) = (line["final_validation"] for line in lines if "final_validation" in line)
    assert [sample["tokens"] for sample in samples] == [samples[0]["tokens"]] * 2
    assert samples[0]["tokens"] <= 200 < whole["tokens"] == outcome.validation.tokens  # type: ignore[union-attr]
    chosen = manifest.read(read.find(tmp_path / "run")).validation
    assert chosen == samples[1]["bits_per_byte"] != whole["bits_per_byte"]
    assert "on all" in after_training(outcome) and not outcome.sampled


@pytest.mark.parametrize("rows", [pytest.param("windows", marks=pytest.mark.slow), "documents"])
def test_downsampled_model_learns_and_scores_all_bytes(recipe_of: Recipes, tmp_path: Path, rows: str) -> None:
    blocks = recipe_of("training.steps=40", "model.downsample={factor: 4, layers: 1}", f"text.rows={rows}")
    outcome = train(blocks, tmp_path / "run")
    assert losses(tmp_path / "run")[-1] < 2.7 and outcome.validation is not None
    tokens = prepare_run(blocks).tokens
    assert outcome.validation.bytes == len(tokens.tokenizer.decode_bytes(tokens.validation.tokens))


def test_features_are_resampled_every_few_steps(recipe_of: Recipes, tmp_path: Path) -> None:
    favor = ["model.attention.feature_map=favor", "model.attention.favor.resample_every=3"]
    often = ["training.steps=7", "training.checkpoint_every=1", "training.keep_last=9"]
    train(recipe_of(*favor, *often), tmp_path / "run")
    name = "blocks.0.mixer.attention.feature_map.projection"
    rows = {step: read.read_weights(checkpoint_at(tmp_path / "run", step))[name] for step in (1, 3, 4, 6, 7)}
    assert torch.equal(rows[1], rows[3]) and torch.equal(rows[4], rows[6])
    assert not torch.equal(rows[3], rows[4]) and not torch.equal(rows[6], rows[7])


@pytest.mark.parametrize(
    ("start", "change"),
    [
        ("softmax", ["feature_map=favor", "decay=none"]),
        ("softmax", ["feature_map=taylor", "decay=learned"]),
        ("trained", ["kind=softmax"]),
    ],
)
def test_fine_tuning_may_change_the_attention(
    recipe_of: Recipes, request: pytest.FixtureRequest, start: str, change: list[str]
) -> None:
    """All that is not the attention's own is taken over, and the attention's own is as a new model has it."""
    run = request.getfixturevalue(start)
    convolution = ["model.convolution=0"] if start == "softmax" else []
    recipe = recipe_of(*convolution, *(f"model.attention.{word}" for word in change))
    fresh, tuned = prepare_run(recipe).model.state_dict(), prepare_run(recipe, read.find(run), True).model
    base = weights(run)
    for name, tensor in tuned.state_dict().items():
        assert torch.equal(tensor, base.get(name, fresh[name])), name
    with pytest.raises(CheckpointError, match=r"mixer\.(attention|forget|gate)"):
        prepare_run(recipe, read.find(run))


def test_trained_tokens_include_those_of_earlier_runs(recipe_of: Recipes, tmp_path: Path) -> None:
    train(recipe_of("training.steps=3"), tmp_path / "base")
    from_base = f"training.init_from={tmp_path / 'base'}"
    for steps in (2, 4):
        train(recipe_of(f"training.steps={steps}", from_base), tmp_path / "tuned", resume="auto")
    train(recipe_of("training.steps=1", f"training.init_from={tmp_path / 'tuned'}"), tmp_path / "last")
    found = {name: open_run(tmp_path / name, "cpu").trained_tokens for name in ("base", "tuned", "last")}
    assert found == {"base": 3 * 256, "tuned": 7 * 256, "last": 8 * 256}


def test_resume_skips_a_damaged_checkpoint(recipe_of: Recipes, trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert resume_point(run, "auto") is None, "a run that has not begun begins"
    newest, before = read.find(copied(trained, run)), checkpoint_at(run, 11)
    assert resume_point(run, "auto") == newest
    sealed = (newest / manifest.NAME).read_bytes()
    (newest / manifest.NAME).write_bytes(b"")
    assert resume_point(run, "auto") == before
    (newest / manifest.NAME).write_bytes(sealed)
    size = (newest / "training.safetensors").stat().st_size
    (newest / "training.safetensors").write_bytes(bytes(size))
    assert resume_point(run, "auto") == before
    with pytest.raises(CheckpointError, match=r"step-00000012/training\.safetensors: not what was saved"):
        train(recipe_of("training.steps=14"), run, resume=str(newest))
    train(recipe_of("training.keep_last=9"), run, resume="auto")
    manifest.verify(newest)
    assert (run / "abandoned-1" / "checkpoints" / newest.name / "training.safetensors").read_bytes() == bytes(size)


def test_resume_begins_a_run_without_a_checkpoint(
    recipe_of: Recipes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "environment.json").write_text('{"packages": {"lmlong": "0.1.0"}}')
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 9.0}\n')
    train(recipe_of("training.steps=2"), run, resume="auto")
    assert len(losses(run)) == 2 and 9.0 not in losses(run)
    assert f"{run}: no checkpoint yet, so a new run begins" in capsys.readouterr().err
    train(recipe_of("training.steps=3"), run, resume="auto")
    assert "new run" not in capsys.readouterr().err


MISSING = "device is cpu" if find_spec("triton") else "triton is not installed"


@pytest.mark.parametrize(
    ("option", "kind", "message"),
    [
        ("precision=16", "linear", r"training\.precision: 16 needs a GPU"),
        ("kernel=triton", "linear", rf"training\.kernel: triton cannot be used here: .*{MISSING}.* Use torch"),
        ("kernel=triton", "softmax", r"training\.kernel: no attention of the model \(softmax\) has a kernel triton"),
        ("kernel=triton", "ngram", r"training\.kernel: no attention of the model \(ngram\) has a kernel triton"),
    ],
)
def test_what_needs_a_gpu_is_refused_without(
    recipe_of: Recipes, monkeypatch: pytest.MonkeyPatch, option: str, kind: str, message: str
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UsageError, match=message):
        prepare_run(recipe_of("device=cpu", f"training.{option}", f"model.attention.kind={kind}"))


def test_bfloat16_learns_what_float32_learns(recipe_of: Recipes, trained: Path, tmp_path: Path) -> None:
    train(recipe_of("training.precision=bf16"), tmp_path / "bf16")
    assert losses(tmp_path / "bf16") == pytest.approx(losses(trained), rel=0.02)
    assert losses(tmp_path / "bf16") != pytest.approx(losses(trained), rel=1e-6)


def test_kernel_with_a_wrong_gradient_is_not_used(
    recipe_of: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(LinearAttention, "kernels", {"torch": ChunkKernel, "bad": WrongDk})
    train(recipe_of("training.steps=1"), tmp_path / "run")
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("kernel")]
    assert lines == ["kernel: linear is computed by torch, since bad differs: dk is off by 2e-02"]
    assert load(tmp_path / "run", "cpu").model.attentions[0].kernel_name == "bad"  # its outputs are right


HEADS = [*SOFTMAX, "model.add_ngram=[1]", "model.attention.ngram.buckets=64"]
ALONE = [*HEADS, "training.only_ngram=true"]


def test_added_heads_are_trained_alone_and_removed(softmax: Path, recipe_of: Recipes, tmp_path: Path) -> None:
    def first_loss(run: str, start: Path, *options: str) -> float:
        train(recipe_of(f"training.init_from={start}", *options), tmp_path / run)
        return losses(tmp_path / run)[0]

    still = [*SOFTMAX, "training.steps=1", "training.learning_rate=1e-30"]
    first, heads = first_loss("heads", softmax, *ALONE, "training.steps=15"), tmp_path / "heads"
    before, after = weights(softmax), weights(heads)
    added = after.keys() - before.keys()
    assert added and all(name.startswith("blocks.0.ngram.") for name in added)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert after["blocks.0.ngram.out_proj.weight"].abs().max() > 0
    assert first == first_loss("without", softmax, *still), "new heads leave the first loss as it is"
    assert first_loss("again", heads, *HEADS, "training.steps=1") < first
    assert first_loss("removed", heads, *still, "model.add_ngram=[]") == first
    assert weights(tmp_path / "removed").keys() == before.keys()


SLOTS = ["model.attention.kind=linformer", "model.attention.linformer={projected: 16, projection: mean}"]
FULL = "model.attention.kind=full"
BLOCKS = ["model.downsample={factor: 7, kind: conv, layers: 1}"]
HOURGLASS = ["model.layers=3", FULL, "model.downsample={factor: 3, kind: max}"]


@pytest.fixture
def masked(recipe_of: Recipes) -> Recipes:
    """The tiny recipe with an encoder's objective."""
    return lambda *overrides: recipe_of("objective=masked", *overrides)


@pytest.mark.parametrize(
    ("options", "steps"), [(HOURGLASS, 60), pytest.param(SLOTS, 200, marks=pytest.mark.slow)], ids=["full", "linformer"]
)
def test_encoder_learns_from_both_sides(masked: Recipes, tmp_path: Path, options: list[str], steps: int) -> None:
    """Letters in turn, each as frequent as the others: only the visible ones around tell a hidden one."""
    (tmp_path / "book.txt").write_text("abcdefgh" * 2000)
    longer = [f"training.steps={steps}", "training.batch_size=8", f"text.sources.0.paths=[{tmp_path}/book.txt]"]
    outcome = train(masked(*longer, "training.validate_every=150", *options), tmp_path / "run")
    assert outcome.validation is not None and outcome.baselines is None
    assert outcome.validation.nats_per_token < 0.3 * math.log(8)


def test_figures_are_those_of_the_weights(masked: Recipes, tmp_path: Path) -> None:
    outcome = train(masked(), tmp_path / "run")
    setup = prepare_run(masked(), read.find(tmp_path / "run"))
    batches = [batch_tensors(batch) for batch in setup.data.validation()]
    again = loss_totals(setup.model.eval(), batches, torch.from_numpy(setup.tokens.tokenizer.token_bytes))
    assert outcome.validation is not None
    assert again.nats == pytest.approx(outcome.validation.nats, rel=1e-6)
    assert again.tokens == outcome.validation.tokens == sum(int((t != -100).sum()) for _, t, _ in batches)

    lines = metrics(tmp_path / "run")
    assert after_training(outcome).startswith("validation   perplexity ")
    validation = lines[-1]["validation"]
    assert validation["perplexity"] == pytest.approx(math.exp(again.nats / again.tokens), rel=1e-6)
    assert "bits_per_byte" not in validation
    step = next(line for line in lines if "loss" in line)
    assert step["perplexity"] == pytest.approx(math.exp(step["loss"])) and "bits_per_byte" not in step
    validated = {line["step"]: line["validation"]["perplexity"] for line in lines if "validation" in line}
    best = read.find(tmp_path / "run" / "checkpoints" / "best")
    assert int(best.name[5:]) == min(validated, key=lambda at: validated[at])


@pytest.mark.parametrize("rows", ["windows", "documents"])
def test_downsampling_reads_the_same_batches(masked: Recipes, rows: str) -> None:
    flat, hourglass = (prepare_run(masked(f"text.rows={rows}", *options)).data for options in ([], BLOCKS))
    for step in range(3):
        pairs = zip(flat.training().batch(step), hourglass.training().batch(step), strict=True)
        assert all(np.array_equal(mine, others) for mine, others in pairs)


def test_fine_tuning_takes_weights_of_an_encoder(recipe_of: Recipes, masked: Recipes, tmp_path: Path) -> None:
    train(masked(FULL), tmp_path / "base")
    start = f"training.init_from={tmp_path / 'base'}"
    train(masked(*SLOTS, start, "training.steps=1"), tmp_path / "tuned")
    assert losses(tmp_path / "tuned")[0] < losses(tmp_path / "base")[0] - 0.3
    with pytest.raises(CheckpointError, match="embedding"):
        train(recipe_of(start), tmp_path / "causal")
