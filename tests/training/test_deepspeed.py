"""The real DeepSpeed, on CPUs: what it trains is what training without it does, at every stage, and ends in the same
files."""

import json
import os
from pathlib import Path

import pytest
import torch

import lmlong
from lmlong.checkpoint.manifest import FILES, NAME
from lmlong.errors import UsageError
from lmlong.training.deepspeed_strategy import LEFT_BEHIND
from lmlong.training.run import train

from .conftest import SOFTMAX, TEACHER, Recipes, checkpoint_at, losses, of_run, sharded, train_in_processes, weights
from .test_several_processes import ADAMW, BF16, CARRY, FAVOR, RECOMPUTED, SEGMENT, assert_same_run

STEPS = (
    *("training.clip=0.05", "training.batch_size=2"),  # far below the gradients, so that their scale would show
    *("training.steps=6", "training.schedule=constant", "training.keep_last=9"),
    *("training.checkpoint_every=2", "training.validate_every=2", "text.validation.fraction=0.2"),
)
ONE, TWO = (*STEPS, "training.accumulate=4"), (*STEPS, "training.accumulate=2", "devices=2")
SAME = (1e-4, 1e-2, 2e-3)
"""The errors of losses, norms and weights."""


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3])
def test_two_processes_are_one_run(
    tiny: Path, recipe_of: Recipes, tmp_path: Path, stage: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """They resume a run without DeepSpeed, and such a run resumes theirs. Stage 3 has all that the others have."""
    alone, whole, fewer = (tmp_path / name for name in ("alone", "whole", "fewer"))
    train(recipe_of(*ONE), alone)
    options = [*TWO, SEGMENT, *sharded(stage, tmp_path)]
    _, errors = train_in_processes(tiny, whole, *options, "--resume", checkpoint_at(alone, 2))
    assert "Warning" not in errors
    assert_same_run(whole, alone, *SAME)
    assert {path.name for path in checkpoint_at(whole, 6).iterdir()} == {*FILES, NAME}
    capsys.readouterr()
    train(recipe_of(*TWO, "devices=1"), fewer, resume=str(checkpoint_at(whole, 4)))
    assert "changed since the checkpoint: training.accumulate from 2 to 4" in capsys.readouterr().err
    assert_same_run(fewer, whole, *SAME)
    assert "".join(lmlong.load(str(fewer)).stream("the ", max_tokens=20))


NEW, ALONE, DIVIDED = "", "without DeepSpeed", "with DeepSpeed"
"""How a run is begun before it is resumed with DeepSpeed."""

ENCODER = ("objective=masked", "model.attention.kind=linformer", "model.attention.linformer.projected=16")

NGRAM_HEADS = (*SOFTMAX, "model.add_ngram=[1]", "model.attention.ngram.buckets=64")

CASES: dict[str, tuple[int, tuple[str, ...], str]] = {
    "stage 1": (1, (), ALONE),
    "stage 2, AdamW": (2, (ADAMW,), ALONE),
    "stage 2, bfloat16": (2, (BF16,), NEW),
    "stage 3, AdamW": (3, (ADAMW,), ALONE),
    "stage 3, softmax and n-gram heads": (3, (*NGRAM_HEADS, RECOMPUTED), NEW),
    "stage 3, encoder": (3, ENCODER, DIVIDED),
}
SLOW: dict[str, tuple[int, tuple[str, ...], str]] = {
    "stage 3, bfloat16": (3, (BF16,), NEW),
    "stage 3, taylor": (
        3,
        ("model.attention.feature_map=taylor", "model.attention.decay=fixed", "model.dropout=0.1"),
        NEW,
    ),
    "stage 3, favor": (3, (FAVOR, RECOMPUTED, SEGMENT), NEW),
    "stage 3, window": (3, ("model.attention.kind=[window, linear]", "model.attention.window=20", CARRY), NEW),
    "stage 3, a teacher": (3, (TEACHER, SEGMENT), NEW),
}
"""The stage, what is trained, and how it is begun."""


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_run_is_that_without_deepspeed(
    recipe_of: Recipes, softmax: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stage, options, begun = (CASES | SLOW)[name]
    alone, run = (*ONE, *of_run(options, softmax)), tmp_path / "run"
    divided, before = (*alone, *sharded(stage, tmp_path)), dict(os.environ)
    train(recipe_of(*alone), tmp_path / "alone")
    if begun == DIVIDED:
        train(recipe_of(*divided, "training.steps=4"), run)
    train(recipe_of(*divided), run, resume=str(checkpoint_at(tmp_path / "alone", 2)) if begun == ALONE else "auto")
    changed = "changed since the checkpoint: training.strategy from auto to deepspeed"
    assert (changed in capsys.readouterr().err) == (begun == ALONE)
    assert {name for name in LEFT_BEHIND if os.environ.get(name) != before.get(name)} == set()
    if BF16 in options:
        assert_same_run(run, tmp_path / "alone", 1e-3)
        assert losses(run)[0] == pytest.approx(losses(tmp_path / "alone")[0], rel=1e-6), "products are rounded"
        assert {tensor.dtype for tensor in weights(run).values()} == {torch.float32}
    else:
        assert_same_run(run, tmp_path / "alone", *SAME)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_small_model_takes_little_memory(recipe_of: Recipes, tmp_path: Path, stage: int) -> None:
    """Even of what it is given and never touches, by which a process may become too large to be forked."""
    train(recipe_of("training.steps=1", *sharded(stage, tmp_path)), tmp_path / "first")
    before = address_space()
    train(recipe_of("training.steps=1", *sharded(stage, tmp_path)), tmp_path / "second")
    assert address_space() - before < 1 << 30


def address_space() -> int:
    """Bytes of all that this process has mapped."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmSize"))
    return int(line.split()[1]) << 10


SETTINGS: list[tuple[dict, str]] = [
    ({"bf16": {"enabled": True}}, "bf16 comes from the recipe's training.precision"),
    ({"zero_optimization": {"stage": 1}}, "zero_optimization.stage comes from the recipe's training.deepspeed.sta"),
    (
        {"zero_optimization": {"round_robin_gradients": True}},
        "zero_optimization.round_robin_gradients is True: it puts",
    ),
    ({"zero_optimization": {"parameter_alignment": True}}, "zero_optimization.parameter_alignment is True: it pads"),
    ({"zero_optimization": {"zero_hpz_partition_size": 2}}, "zero_optimization.zero_hpz_partition_size is 2"),
    (
        {"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}},
        r"zero_optimization.zenflow is \{.*mix up the weights. Rem",
    ),
    ({"zero_optimization": "x"}, "zero_optimization is 'x', not an object"),
    ({"zero_optimization": {"reduce_bucket_size": "x"}}, r"zero_optimization is \{.*valid integer"),
    ({"steps_per_print": 9, "wall_clock_breakdown": "x"}, "wall_clock_breakdown is 'x', which DeepSpeed cannot read"),
]


def test_wrong_settings_are_refused(recipe_of: Recipes, tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    options = ["training.strategy=deepspeed", f"training.deepspeed.config={file}"]
    for settings, message in SETTINGS:
        file.write_text(json.dumps(settings))
        with pytest.raises(UsageError, match=rf"training\.deepspeed\.config: {file}: {message}"):
            train(recipe_of(*options), tmp_path / "run")
    file.write_text("[1")
    with pytest.raises(UsageError, match="not a JSON object"):
        train(recipe_of(*options), tmp_path / "run")
    file.unlink()
    with pytest.raises(UsageError, match="No such file"):
        train(recipe_of(*options), tmp_path / "run")
    assert not (tmp_path / "run").exists()
