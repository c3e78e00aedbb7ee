"""Whole runs of a tiny recipe: what they report is true, and how they are cut up changes nothing."""

from importlib.util import find_spec
from pathlib import Path

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
from lmlong.model.segments import text_loss
from lmlong.training.prepare import prepare_run
from lmlong.training.resume import resume_point
from lmlong.training.run import train

from .conftest import SOFTMAX, Recipes, checkpoint_at, copied, losses, metrics, weights


def test_run_learns_and_reports_its_weights(recipe_of: Recipes, tmp_path: Path) -> None:
    result, run = train(recipe_of("training.steps=40"), tmp_path / "run"), tmp_path / "run"
    assert result.step == 40 and result.signal is None and result.validation is not None
    first, last = losses(run)[0], losses(run)[-1]
    assert first > 5.4 and last < 2.5  # ln 258 = 5.55; the text's own letters alone give about 2.8

    setup = prepare_run(recipe_of(), read.find(run))
    tokens = setup.tokens
    text = scored_tokens(tokens.validation.tokens, tokens.tokenizer.bos, tokens.tokenizer.eos)
    batches = (batch_tensors(batch) for batch in validation_batches(text, 64, 3))
    again = loss_totals(setup.model.eval(), batches, torch.from_numpy(tokens.tokenizer.token_bytes))
    assert again.nats == pytest.approx(result.validation.nats, rel=1e-6)
    assert again.bytes == result.validation.bytes == len(tokens.tokenizer.decode_bytes(tokens.validation.tokens))
    assert metrics(run)[-1]["validation"]["bits_per_byte"] == result.validation.bits_per_byte


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
    setup = prepare_run(blocks, read.find(tmp_path / "run"))
    tokens, tokenizer = setup.tokens.validation.tokens, setup.tokens.tokenizer
    assert outcome.validation.bytes == len(tokenizer.decode_bytes(tokens))
    # padding changes no figure: blocks that documents cut short are read to the same loss
    lost = 0.0
    for begin in range(0, 3 * 64, 64):  # the text is one document, so its windows are cut alike
        text = torch.from_numpy(tokens[begin : begin + 65].astype("int64"))[None]
        lost += float(text_loss(setup.model, text[:, :-1], text[:, 1:], text[:, :-1] == tokenizer.bos)[0].detach())
    first, *_ = validation_batches(scored_tokens(tokens, tokenizer.bos, tokenizer.eos, factor=4), 64, 3)
    assert float(text_loss(setup.model, *batch_tensors(first))[0].detach()) == pytest.approx(lost, rel=1e-4)


def test_run_folder_has_the_documented_files(recipe_of: Recipes, tmp_path: Path) -> None:
    """Each validation saves the checkpoint that may be the best."""
    options = ("training.validate_every=5", "training.checkpoint_every=100", "training.keep_last=9")
    train(recipe_of(*options), tmp_path / "run")
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {"recipe.yaml", "environment.json", "metrics.jsonl", "tokenizer.model", "checkpoints"}
    checkpoints = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-00000005", "step-00000010", "step-00000012"]
    assert read.find(checkpoints / "latest").name == "step-00000012"
    for path in checkpoints.iterdir():
        manifest.verify(path)
    assert read.read_recipe(read.find(tmp_path / "run")).training.precision == "32"


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["training.precision=16"], "training.precision: 16 needs a GPU"),
        (["training.kernel=triton"], "training.kernel: triton cannot be used here: "),
        (
            ["training.kernel=triton", "model.attention.kind=softmax"],
            "training.kernel: no attention of the model (softmax) has a kernel triton",
        ),
    ],
)
def test_what_needs_a_gpu_is_refused_without(
    recipe_of: Recipes, monkeypatch: pytest.MonkeyPatch, options: list[str], message: str
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UsageError) as refused:
        prepare_run(recipe_of("device=cpu", *options))
    assert message in str(refused.value)
    if "cannot be used" in message:
        missing = "device is cpu" if find_spec("triton") else "triton is not installed"
        assert missing in str(refused.value) and " Use torch" in str(refused.value)


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
