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
from lmlong.training.run import TrainingResult, train

from .conftest import SOFTMAX, Recipes, checkpoint_at, copied, losses, metrics, weights


@pytest.fixture(scope="module")
def learned(recipe_of: Recipes, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainingResult:
    """A run of 40 steps."""
    return train(recipe_of("training.steps=40"), tmp_path_factory.mktemp("learned") / "run")


def test_run_learns_and_reports_its_weights(recipe_of: Recipes, learned: TrainingResult) -> None:
    assert learned.step == 40 and learned.signal is None and learned.validation is not None
    first, last = losses(learned.run)[0], losses(learned.run)[-1]
    assert first > 5.4 and last < 2.5  # ln 258 = 5.55; the text's own letters alone give about 2.8

    setup = prepare_run(recipe_of(), read.find(learned.run))
    tokens = setup.tokens
    text = scored_tokens(tokens.validation.tokens, tokens.tokenizer.bos, tokens.tokenizer.eos)
    batches = (batch_tensors(batch) for batch in validation_batches(text, 64, 3))
    again = loss_totals(setup.model.eval(), batches, torch.from_numpy(tokens.tokenizer.token_bytes))
    assert again.nats == pytest.approx(learned.validation.nats, rel=1e-6)
    assert again.bytes == learned.validation.bytes == len(tokens.tokenizer.decode_bytes(tokens.validation.tokens))
    assert metrics(learned.run)[-1]["validation"]["bits_per_byte"] == learned.validation.bits_per_byte


def test_best_is_chosen_by_a_sample_and_all_text_is_scored(recipe_of: Recipes, tmp_path: Path) -> None:
    outcome = train(recipe_of("training.validation_tokens=200", "training.checkpoint_every=6"), tmp_path / "run")
    lines = [line for line in metrics(tmp_path / "run") if "loss" not in line]
    samples = [line["validation"] for line in lines if "validation" in line]
    (whole,) = (line["final_validation"] for line in lines if "final_validation" in line)
    assert [sample["tokens"] for sample in samples] == [samples[0]["tokens"]] * 2
    assert samples[0]["tokens"] <= 200 < whole["tokens"] == outcome.validation.tokens  # type: ignore[union-attr]
    assert (
        manifest.read(read.find(tmp_path / "run")).validation == samples[1]["bits_per_byte"] != whole["bits_per_byte"]
    )
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
    for number, begin in enumerate(range(0, len(tokens) - 1, 64)):
        text = torch.from_numpy(tokens[begin : begin + 65].astype("int64"))[None]
        if number < 3:  # the text is one document, so its windows are cut alike
            nats, _ = text_loss(setup.model, text[:, :-1], text[:, 1:], text[:, :-1] == tokenizer.bos)
            lost += float(nats.detach())
    found = list(validation_batches(scored_tokens(tokens, tokenizer.bos, tokenizer.eos, factor=4), 64, 3))
    assert float(text_loss(setup.model, *batch_tensors(found[0]))[0].detach()) == pytest.approx(lost, rel=1e-4)


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


FAVOR = ["model.attention.feature_map=favor", "model.attention.favor.resample_every=3"]


def test_features_are_resampled_every_few_steps(recipe_of: Recipes, tmp_path: Path) -> None:
    train(
        recipe_of(*FAVOR, "training.steps=7", "training.checkpoint_every=1", "training.keep_last=9"), tmp_path / "run"
    )
    rows = {}
    for step in (1, 3, 4, 6, 7):
        saved = read.read_weights(tmp_path / "run" / "checkpoints" / f"step-{step:08d}")
        rows[step] = saved["blocks.0.mixer.attention.feature_map.projection"]
    assert torch.equal(rows[1], rows[3]) and torch.equal(rows[4], rows[6])
    assert not torch.equal(rows[3], rows[4]) and not torch.equal(rows[6], rows[7])


def test_fine_tuning_takes_weights_and_tokenizer(recipe_of: Recipes, learned: TrainingResult, tmp_path: Path) -> None:
    train(recipe_of("training.steps=1", f"training.init_from={learned.run}"), tmp_path / "tuned")
    assert learned.validation and losses(tmp_path / "tuned")[0] < learned.validation.nats_per_token + 0.3
    assert (tmp_path / "tuned" / "tokenizer.model").read_bytes() == (learned.run / "tokenizer.model").read_bytes()


@pytest.mark.parametrize("change", [["feature_map=favor", "decay=none"], ["feature_map=taylor", "decay=learned"]])
def test_fine_tuning_may_change_the_attention(recipe_of: Recipes, softmax: Path, change: list[str]) -> None:
    """All that is not the attention's own is taken over, and the attention's own is as a new model has it."""
    recipe = recipe_of("model.convolution=0", *(f"model.attention.{word}" for word in change))
    fresh, tuned = prepare_run(recipe).model.state_dict(), prepare_run(recipe, read.find(softmax), True).model
    base = weights(softmax)
    for name, tensor in tuned.state_dict().items():
        assert torch.equal(tensor, base.get(name, fresh[name])), name
    with pytest.raises(CheckpointError, match=r"mixer\.(attention|forget)"):
        prepare_run(recipe, read.find(softmax))


def test_fine_tuning_may_drop_weights_of_the_attention(recipe_of: Recipes, trained: Path, tmp_path: Path) -> None:
    softmax = ("model.attention.kind=softmax", f"training.init_from={trained}", "training.steps=1")
    train(recipe_of(*softmax), tmp_path / "back")
    assert weights(tmp_path / "back").keys() < weights(trained).keys()


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


def test_sample_changes_nothing(
    recipe_of: Recipes, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(recipe_of("training.sample_tokens=9"), tmp_path / "run")
    samples = {line["step"]: line["sample"] for line in metrics(tmp_path / "run") if "sample" in line}
    assert samples.keys() == {6, 12} and all(samples.values())
    assert capsys.readouterr().err.count("a sample") == 2
    assert losses(tmp_path / "run") == losses(trained)


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


def test_missing_text_is_named(recipe_of: Recipes, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere\.txt: no such file .*Correct text\.sources\.$"):
        train(recipe_of("text.sources=[{kind: files, paths: [nowhere.txt]}]"), tmp_path / "run")


def test_float16_and_triton_need_a_gpu(recipe_of: Recipes, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"training\.precision: 16 needs a GPU"):
        prepare_run(recipe_of("training.precision=16", "device=cpu"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    missing = "device is cpu" if find_spec("triton") else "triton is not installed"
    with pytest.raises(UsageError, match=rf"training\.kernel: triton cannot be used here: .*{missing}.* Use torch"):
        prepare_run(recipe_of("training.kernel=triton", "device=cpu"))


def test_bfloat16_learns_what_float32_learns(recipe_of: Recipes, trained: Path, tmp_path: Path) -> None:
    train(recipe_of("training.precision=bf16"), tmp_path / "bf16")
    assert losses(tmp_path / "bf16") == pytest.approx(losses(trained), rel=0.02)
    assert losses(tmp_path / "bf16") != pytest.approx(losses(trained), rel=1e-6)


def test_validation_source_is_validated(recipe_of: Recipes, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("0123456789 " * 500)
    source = f"{{kind: files, paths: [{other}]}}"
    outcome = train(recipe_of(f"text.validation.sources=[{source}]", "training.steps=1"), tmp_path / "run")
    assert outcome.validation is not None
    assert outcome.validation.bytes == 5500


def test_kernel_with_a_wrong_gradient_is_not_used(
    recipe_of: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(LinearAttention, "kernels", {"torch": ChunkKernel, "bad": WrongDk})
    train(recipe_of("training.steps=1"), tmp_path / "run")
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("kernel")]
    assert lines == ["kernel: linear is computed by torch, since bad differs: dk is off by 2e-02"]
    assert load(tmp_path / "run", "cpu").model.attentions[0].kernel_name == "bad"  # its outputs are right


def test_kernel_of_no_attention_is_refused(recipe_of: Recipes) -> None:
    with pytest.raises(
        UsageError, match=r"training\.kernel: no attention of the model \(softmax\) has a kernel triton"
    ):
        prepare_run(recipe_of("training.kernel=triton", "model.attention.kind=softmax"))


HEADS = [*SOFTMAX, "model.add_ngram=[1]", "model.attention.ngram.buckets=64"]
ALONE = [*HEADS, "training.only_ngram=true"]


def test_added_heads_are_trained_alone(softmax: Path, recipe_of: Recipes, tmp_path: Path) -> None:
    start = f"training.init_from={softmax}"
    for steps in (1, 15):
        train(recipe_of(start, *ALONE, f"training.steps={steps}"), tmp_path / f"{steps}")
    before, after = weights(softmax), weights(tmp_path / "15")
    added = after.keys() - before.keys()
    assert added and all(name.startswith("blocks.0.ngram.") for name in added)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert after["blocks.0.ngram.out_proj.weight"].abs().max() > 0
    train(recipe_of(start, *SOFTMAX, "training.steps=1", "training.learning_rate=1e-30"), tmp_path / "without")
    without, first = losses(tmp_path / "without")[0], losses(tmp_path / "1")[0]
    assert first == without  # new heads leave the first loss as it is
    train(recipe_of(f"training.init_from={tmp_path / '15'}", *HEADS, "training.steps=1"), tmp_path / "again")
    assert losses(tmp_path / "again")[0] < first  # and after training the loss of the same batch is lower


def test_added_heads_can_be_removed(softmax: Path, recipe_of: Recipes, tmp_path: Path) -> None:
    train(recipe_of(f"training.init_from={softmax}", *HEADS, "training.steps=1"), tmp_path / "with")
    start = [f"training.init_from={tmp_path / 'with'}", "training.steps=1", "model.add_ngram=[]"]
    train(recipe_of(*start, *SOFTMAX), tmp_path / "without")
    assert weights(tmp_path / "without").keys() == weights(softmax).keys()
