"""The bytes of tensors that a process holds, by calculation."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lmlong.training import deepspeed_config, step_bytes
from lmlong.training.step_bytes import LastProcess, activation_bytes, count_state, gathered_bytes, pass_through

from .conftest import Recipes

VOCABULARY = 260
"""That of bytes."""

PARTS = ("devices=2", "training.sequence_parallel=2")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["training.strategy=deepspeed", "training.deepspeed.stage=2", "training.optimizer=adamw"],
        [
            "training.strategy=deepspeed",
            "training.deepspeed.stage=2",
            "training.optimizer=adamw",
            "training.activation_checkpointing=true",
        ],
        ["training.strategy=deepspeed", "training.deepspeed.stage=3", "training.optimizer=adamw"],
        ["training.optimizer=adamw", "model.attention.kind=[delta, window]"],
    ],
    ids=["stage 2", "recomputed", "stage 3", "ddp"],
)
def test_two_processes_hold_and_send_what_is_computed(
    tiny: Path, recipe_of: Recipes, tmp_path: Path, options: list[str]
) -> None:
    """Weights and activations are about equal. The processes are real, since gradients are divided among them."""
    shape = ["model.width=512", "model.heads=8", "model.layers=4", "text.sequence_length=1536", "training.batch_size=1"]
    overrides = [*PARTS, *shape, *options, "training.steps=2", "training.validation_tokens=100"]
    program = Path(__file__).parent / "counted_run.py"
    subprocess.run([sys.executable, program, tmp_path, tiny, *overrides], check=True, capture_output=True, timeout=500)
    recipe, group = recipe_of(*overrides), LastProcess(2)
    computed = step_bytes.step_bytes(recipe, VOCABULARY, recipe.text.sequence_length, on_gpu=False)
    assert computed.activations > 0.5 * computed.weights and computed.weights > 0.2 * computed.activations
    pass_through(recipe, VOCABULARY, recipe.text.sequence_length, group)
    for rank in range(2):
        counted = json.loads((tmp_path / f"{rank}.json").read_text())
        assert computed.total == pytest.approx(counted["peak"], rel=0.15)
        assert group.bytes_sent == counted["sent"]


def test_a_stage_divides_more_of_the_training_state(recipe_of: Recipes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed_config, "SPAN", 1000)  # stage 3 saves memory only in a model of more weights

    def state(*options: str) -> step_bytes.StepBytes:
        recipe = recipe_of("training.optimizer=adamw", *options)
        return count_state(recipe, VOCABULARY, on_gpu=False)

    alone, ddp = state(), state("devices=4")
    size = alone.weights
    assert alone == (size, size, 2 * size, 0, 0) and ddp == (size, 2 * size, 2 * size, 0, 0)
    stages = [state("devices=4", "training.strategy=deepspeed", f"training.deepspeed.stage={n}") for n in (1, 2, 3)]
    assert alone.total > stages[0].total >= stages[1].total > stages[2].total
    assert all(abs(stage.moments - size / 2) < 16 for stage in stages)
    assert stages[1].weights - size == pytest.approx(size / 4, abs=16)


@pytest.mark.parametrize("kind", ["linear", "softmax"])
def test_a_process_holds_the_activations_of_its_part(recipe_of: Recipes, kind: str) -> None:
    recipe = recipe_of(f"model.attention.kind={kind}", "model.layers=1", *PARTS)
    whole, half = (activation_bytes(recipe, VOCABULARY, tokens) for tokens in (4096, 2048))
    assert half == pytest.approx(whole / 2, rel=0.1)
    short, long = (gathered_bytes(recipe, length, 2) for length in (8192, 32768))
    assert long > 3 * short if kind == "softmax" else long == short
    assert gathered_bytes(recipe, 8192, 1) == 0 < short < gathered_bytes(recipe, 8192, 8)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["false", "true"])
def test_more_tokens_and_layers_are_in_proportion(
    recipe_of: Recipes, monkeypatch: pytest.MonkeyPatch, recompute: str
) -> None:
    recipe = recipe_of("model.layers=4", f"training.activation_checkpointing={recompute}", *PARTS)

    def found(tokens: int, layers: int) -> tuple[int, int]:
        monkeypatch.setattr(step_bytes, "MOST_TOKENS", tokens)
        monkeypatch.setattr(step_bytes, "MOST_LAYERS", layers)
        return activation_bytes(recipe, VOCABULARY, 2048), gathered_bytes(recipe, 4096, 2)

    exact = found(2048, 4)
    assert found(2048, 2) == pytest.approx(exact, rel=0.01)
    assert found(512, 2) == pytest.approx(exact, rel=0.1)
