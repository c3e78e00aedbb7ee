"""Whole runs of a tiny recipe: what they report is true, and how they are cut up changes nothing."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from machine import needs_triton

from lmlong.checkpoint import manifest, read
from lmlong.cli.after_training import after_training
from lmlong.data.batches import scored_tokens, validation_batches
from lmlong.errors import CheckpointError, UsageError
from lmlong.inference.loading import open_run
from lmlong.model.language_model import LanguageModel
from lmlong.model.metrics import batch_tensors, loss_totals
from lmlong.model.segments import text_loss
from lmlong.training.prepare import prepare_run
from lmlong.training.resume import resume_point
from lmlong.training.run import train

from .conftest import Recipes, assert_resumes_exactly, losses, metrics, weights


def test_a_run_learns_and_its_last_figure_is_that_of_its_weights(recipe_of: Recipes, tmp_path: Path) -> None:
    outcome = train(recipe_of("training.steps=40"), tmp_path / "run")
    assert outcome.step == 40 and outcome.signal is None and outcome.validation is not None
    first, last = losses(tmp_path / "run")[0], losses(tmp_path / "run")[-1]
    assert first > 5.4 and last < 2.5  # ln 258 = 5.55; the text's own letters alone give about 2.8

    setup = prepare_run(recipe_of(), read.find(tmp_path / "run"))
    tokens = setup.tokens
    batches = validation_batches(
        scored_tokens(tokens.validation.tokens, tokens.tokenizer.bos, tokens.tokenizer.eos), 64, 3
    )
    again = loss_totals(
        setup.model.eval(), (batch_tensors(batch) for batch in batches), torch.from_numpy(tokens.tokenizer.token_bytes)
    )
    assert again.nats == pytest.approx(outcome.validation.nats, rel=1e-6)
    assert again.bytes == outcome.validation.bytes == len(tokens.tokenizer.decode_bytes(tokens.validation.tokens))
    assert metrics(tmp_path / "run")[-1]["validation"]["bits_per_byte"] == outcome.validation.bits_per_byte


def test_the_best_is_chosen_by_one_even_sample_and_all_of_the_text_is_scored_beside_it(
    recipe_of: Recipes, tmp_path: Path
) -> None:
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


@pytest.mark.parametrize(("limit", "scored"), [(0, 200), (100, 200), (400, 400)])
def test_the_last_validation_can_be_limited(recipe_of: Recipes, tmp_path: Path, limit: int, scored: int) -> None:
    options = ("training.validation_tokens=200", f"training.final_validation_tokens={limit}", "training.steps=1")
    outcome = train(recipe_of(*options), tmp_path / "run")
    assert outcome.validation is not None and scored - 70 < outcome.validation.tokens <= scored
    assert "on an even sample of" in after_training(outcome) and outcome.sampled


@pytest.mark.parametrize("rows", ["windows", "documents"])
def test_a_run_that_reads_blocks_learns_and_scores_as_many_bytes(recipe_of: Recipes, tmp_path: Path, rows: str) -> None:
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


def test_the_run_folder_holds_what_the_readme_promises(recipe_of: Recipes, tmp_path: Path) -> None:
    train(recipe_of(), tmp_path / "run")
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {"recipe.yaml", "environment.json", "metrics.jsonl", "tokenizer.model", "checkpoints"}
    checkpoints = tmp_path / "run" / "checkpoints"
    assert read.find(checkpoints / "latest").name == "step-00000012"
    assert read.find(checkpoints / "best").name in {"step-00000012", "step-00000004", "step-00000008"}
    for path in checkpoints.glob("step-*"):
        manifest.verify(path)
    assert read.read_recipe(read.find(tmp_path / "run")).training.precision == "32"


DROPOUT = ["model.dropout=0.2", "training.accumulate=2", "training.batch_size=2"]
FAVOR = ["model.attention.feature_map=favor", "model.attention.favor.resample_every=3"]


@pytest.mark.parametrize("options", [DROPOUT, FAVOR], ids=["dropout and accumulation", "resampled features"])
def test_a_run_resumes_exactly(recipe_of: Recipes, tmp_path: Path, options: list[str]) -> None:
    assert_resumes_exactly(recipe_of, tmp_path, *options)


def test_features_are_resampled_only_when_their_step_has_come(recipe_of: Recipes, tmp_path: Path) -> None:
    train(
        recipe_of(*FAVOR, "training.steps=7", "training.checkpoint_every=1", "training.keep_last=9"), tmp_path / "run"
    )
    rows = {}
    for step in (1, 3, 4, 6, 7):
        saved = read.read_weights(tmp_path / "run" / "checkpoints" / f"step-{step:08d}")
        rows[step] = saved["blocks.0.mixer.attention.feature_map.projection"]
    assert torch.equal(rows[1], rows[3]) and torch.equal(rows[4], rows[6])
    assert not torch.equal(rows[3], rows[4]) and not torch.equal(rows[6], rows[7])


def test_segments_and_accumulated_parts_give_the_step_of_the_whole_batch(recipe_of: Recipes, tmp_path: Path) -> None:
    train(recipe_of("training.batch_size=4"), tmp_path / "whole")
    train(recipe_of("training.batch_size=1", "training.accumulate=4", "training.segment=16"), tmp_path / "parts")
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-4)


def test_fine_tuning_starts_from_the_weights_and_the_tokenizer(recipe_of: Recipes, tmp_path: Path) -> None:
    outcome = train(recipe_of("training.steps=40"), tmp_path / "base")
    assert outcome.validation is not None
    train(recipe_of("training.steps=1", f"training.init_from={tmp_path / 'base'}"), tmp_path / "tuned")
    assert losses(tmp_path / "tuned")[0] < outcome.validation.nats_per_token + 0.3
    assert (tmp_path / "tuned" / "tokenizer.model").read_bytes() == (tmp_path / "base/tokenizer.model").read_bytes()


@pytest.mark.parametrize("change", [["feature_map=favor", "decay=none"], ["feature_map=taylor", "decay=learned"]])
def test_fine_tuning_may_change_the_attention(recipe_of: Recipes, tmp_path: Path, change: list[str]) -> None:
    """All that is not the attention's own is taken over, and the attention's own is as a new model has it."""
    attention = [f"model.attention.{word}" for word in change]
    train(recipe_of("model.attention.kind=softmax"), tmp_path / "base")
    recipe = recipe_of(*attention)
    fresh, tuned = prepare_run(recipe).model.state_dict(), prepare_run(recipe, read.find(tmp_path / "base"), True).model
    base = weights(tmp_path / "base")
    for name, tensor in tuned.state_dict().items():
        assert torch.equal(tensor, base.get(name, fresh[name])), name
    with pytest.raises(CheckpointError, match=r"mixer\.(attention|forget)"):
        prepare_run(recipe, read.find(tmp_path / "base"))
    train(recipe_of("model.attention.kind=softmax", f"training.init_from={tmp_path / 'base'}"), tmp_path / "back")


def test_what_delta_needs_and_softmax_lacks_begins_without_effect(recipe_of: Recipes, tmp_path: Path) -> None:
    train(recipe_of("model.attention.kind=softmax", "model.head_norm=false", "model.convolution=0"), tmp_path / "base")
    recipe = recipe_of("model.attention.kind=delta", "model.convolution=3")
    mixer = prepare_run(recipe, read.find(tmp_path / "base"), True).model.blocks[0].mixer
    assert (mixer.head_norm.weight == 1).all() and torch.equal(mixer.convolution.weight, mixer.convolution.identity())


def test_tokens_trained_on_are_those_of_all_runs_that_led_here(recipe_of: Recipes, tmp_path: Path) -> None:
    train(recipe_of("training.steps=3"), tmp_path / "base")
    from_base = f"training.init_from={tmp_path / 'base'}"
    for steps in (2, 4):
        train(recipe_of(f"training.steps={steps}", from_base), tmp_path / "tuned", resume="auto")
    train(recipe_of("training.steps=1", f"training.init_from={tmp_path / 'tuned'}"), tmp_path / "last")
    found = {name: open_run(tmp_path / name, "cpu").trained_tokens for name in ("base", "tuned", "last")}
    assert found == {"base": 3 * 256, "tuned": 7 * 256, "last": 8 * 256}


def test_a_run_that_exists_is_neither_touched_nor_taken_for_another(recipe_of: Recipes, tmp_path: Path) -> None:
    train(recipe_of("training.steps=2"), tmp_path / "run")
    before = losses(tmp_path / "run")
    with pytest.raises(UsageError, match=r"exists\. Resume it with --resume auto, replace it with --overwrite"):
        train(recipe_of("training.steps=3"), tmp_path / "run")
    assert losses(tmp_path / "run") == before
    train(recipe_of("training.steps=3"), tmp_path / "run", overwrite=True)
    assert len(losses(tmp_path / "run")) == 3


def test_auto_passes_over_a_damaged_checkpoint(recipe_of: Recipes, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert resume_point(run, "auto") is None, "a run that has not begun begins"
    train(recipe_of("training.keep_last=9"), run)
    newest = read.find(run)
    assert resume_point(run, "auto") == newest
    sealed = (newest / manifest.NAME).read_bytes()
    (newest / manifest.NAME).write_bytes(b"")
    assert resume_point(run, "auto") == newest.with_name("step-00000008")
    (newest / manifest.NAME).write_bytes(sealed)
    (newest / "training.safetensors").write_bytes(b"")
    assert resume_point(run, "auto") == newest.with_name("step-00000008")
    with pytest.raises(CheckpointError, match=r"step-00000012/training\.safetensors: not what was saved"):
        train(recipe_of("training.steps=14"), run, resume=str(newest))
    train(recipe_of("training.keep_last=9"), run, resume="auto")
    manifest.verify(newest)
    assert (run / "abandoned-1" / "checkpoints" / newest.name / "training.safetensors").read_bytes() == b""


def test_a_sample_is_shown_and_kept_with_each_validation_and_changes_nothing(
    recipe_of: Recipes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(recipe_of("model.dropout=0.1"), tmp_path / "silent")
    assert "sample" not in capsys.readouterr().err
    train(recipe_of("model.dropout=0.1", "training.sample_tokens=9"), tmp_path / "run")
    samples = {line["step"]: line["sample"] for line in metrics(tmp_path / "run") if "sample" in line}
    assert samples.keys() == {6, 12} and all(samples.values())
    assert "step 6/12: a sample" in capsys.readouterr().err
    assert losses(tmp_path / "run") == losses(tmp_path / "silent")


def test_auto_begins_a_run_that_was_stopped_before_its_first_checkpoint(
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


def test_half_precision_needs_a_gpu(recipe_of: Recipes, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"training\.precision: 16 needs a GPU"):
        train(recipe_of("training.precision=16", "device=cpu"), tmp_path / "run")


def test_kernels_need_triton_and_a_gpu(recipe_of: Recipes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    missing = "device is cpu" if find_spec("triton") else "triton is not installed"
    with pytest.raises(UsageError, match=rf"training\.kernel: triton cannot be used here: .*{missing}.* Use torch"):
        prepare_run(recipe_of("training.kernel=triton", "device=cpu"))


@needs_triton
def test_a_run_by_kernels_learns_what_a_run_by_torch_learns(recipe_of: Recipes, tmp_path: Path) -> None:
    for kernel in ("torch", "triton"):
        small = ("model.layers=1", "training.batch_size=1", "training.steps=3", "training.validation_tokens=100")
        train(recipe_of(f"training.kernel={kernel}", *small), tmp_path / kernel)
    assert losses(tmp_path / "triton") == pytest.approx(losses(tmp_path / "torch"), rel=1e-5)
    model = prepare_run(recipe_of("training.kernel=triton")).model
    assert isinstance(model, LanguageModel)
    assert all(attention.kernel_name == "triton" for attention in model.attentions)


def test_bfloat16_learns_what_float32_learns(recipe_of: Recipes, tmp_path: Path) -> None:
    for precision in ("32", "bf16"):
        train(recipe_of(f"training.precision={precision}"), tmp_path / precision)
    assert losses(tmp_path / "bf16") == pytest.approx(losses(tmp_path / "32"), rel=0.02)


def test_sources_are_mixed_and_validated_apart(tiny: Path, recipe_of: Recipes, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("0123456789 " * 500)
    source = f"{{kind: files, paths: [{other}]}}"
    outcome = train(recipe_of(f"text.validation.sources=[{source}]"), tmp_path / "run")
    assert outcome.validation is not None
    assert outcome.validation.bytes == 5500
