"""tools/compare/exported.py finds an exported folder to be its run, and one that was changed not to be."""

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from interop import tiny_llama
from safetensors.torch import load_file, save_file

import lmlong
from lmlong.interop.hf.export import export_hf
from lmlong.interop.onnx.export import export_onnx

TOOL = Path(__file__).parents[2] / "tools" / "compare" / "exported.py"
PROMPTS, TOKENS = 25, 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, its text, its export, and what `write` says of it."""
    pytest.importorskip("transformers")
    made = tmp_path_factory.mktemp("exported")
    (made / "text.txt").write_text(tiny_llama.TEXT * 20)
    recipe = lmlong.Recipe.load(
        {
            "text": {
                "sources": [{"kind": "files", "paths": [str(made / "text.txt")]}],
                "tokenizer": {"kind": "bytes"},
                "sequence_length": 64,
            },
            "model": {
                "width": 32,
                "layers": 3,
                "heads": 2,
                "attention": {"kind": "delta+ngram+window", "ngram": {"sizes": [1, 2], "buckets": 4096}},
            },
            "training": {"steps": 4, "batch_size": 2, "learning_rate": 0.02},
            "device": "cpu",
        }
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LMLONG_CACHE", str(made / "cache"))
        lmlong.train(recipe, out=made / "run")
    export_hf(str(made / "run"), made / "hf")
    assert "held-out text" in tool(made, "write", "run", "expected.npz", "--prompts", PROMPTS, "--tokens", TOKENS)
    return made


def tool(folder: Path, *words: object, status: int = 0) -> str:
    """What the tool prints."""
    environment = {**os.environ, "LMLONG_CACHE": str(folder / "cache"), "HF_HOME": str(folder / "home")}
    command = [sys.executable, str(TOOL), "--threads", "1", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, timeout=300)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def counts(told: str, name: str) -> list[int]:
    """The counts of all prompts, of those alone and of those in one batch."""
    (line,) = (line for line in told.splitlines() if line.startswith(name))
    return [int(number) for number in line.split()[-3:]]


@pytest.mark.interop
def test_an_exported_folder_is_its_run(folder: Path) -> None:
    told = tool(folder, "check", "hf", "expected.npz")
    assert "lmlong: installed here, and kept from being imported" in told
    assert counts(told, "equal") == [PROMPTS, 20, 20] and counts(told, "other") == [0, 0, 0]
    with np.load(folder / "expected.npz") as expected:
        sizes = expected["sizes"]
        assert sizes[0] == 1 and sizes[-1] == 300 and expected["prompts"].shape == (sizes.sum(),)
        assert expected["texts"].shape == (PROMPTS, TOKENS) and expected["logits"].shape == (PROMPTS, 258)


@pytest.mark.interop
def test_so_is_a_graph(folder: Path) -> None:
    pytest.importorskip("onnxruntime")
    export_onnx(str(folder / "run"), folder / "onnx")
    told = tool(folder, "check", "onnx", "expected.npz", "--by", "onnxruntime")
    assert counts(told, "equal") == [PROMPTS, 20, 20] and counts(told, "other") == [0, 0, 0]
    weights = folder / "onnx" / "model.onnx.data"
    weights.write_bytes(weights.read_bytes()[::-1])
    tool(folder, "check", "onnx", "expected.npz", "--by", "onnxruntime", status=1)


@pytest.mark.interop
def test_a_folder_with_one_changed_weight_is_another_model(folder: Path) -> None:
    shutil.copytree(folder / "hf", folder / "changed")
    weights = load_file(folder / "changed" / "model.safetensors")
    name = next(name for name in weights if name.endswith("v_proj.weight") or "in_proj" in name)
    weights[name][0, 0] += 1
    save_file(weights, folder / "changed" / "model.safetensors", metadata={"format": "pt"})
    tool(folder, "check", "changed", "expected.npz", status=1)


@pytest.mark.interop
def test_a_folder_that_reads_padding_as_text_is_another_model(folder: Path) -> None:
    shutil.copytree(folder / "hf", folder / "padded")
    module = folder / "padded" / "modeling_lmlong.py"
    whole, masked = module.read_text(), "self.model(input_ids, attention_mask, cache)"
    assert masked in whole
    module.write_text(whole.replace(masked, "self.model(input_ids, None, cache)"))
    told = tool(folder, "check", "padded", "expected.npz", status=1)
    assert counts(told, "other")[1] == 0


@pytest.mark.interop
def test_prompts_are_drawn_where_the_text_is_gone(folder: Path) -> None:
    shutil.copytree(folder / "run", folder / "alone" / "run", symlinks=True)
    held = (folder / "text.txt").rename(folder / "text.moved")
    try:
        assert "random tokens" in tool(folder / "alone", "write", "run", "drawn.npz", "--prompts", 11, "--tokens", 2)
    finally:
        held.rename(folder / "text.txt")
    assert counts(tool(folder, "check", "hf", "alone/drawn.npz"), "equal") == [11, 11, 11]


def test_texts_that_part_at_a_tie_are_counted_by_themselves() -> None:
    count = runpy.run_path(str(TOOL))["count"]
    expected = np.array([[1, 2, 3]] * 4)
    found = np.array([[1, 2, 3], [1, 5, 3], [1, 5, 9], [1, 2, 9]])
    gaps = np.array([[1.0, 5e-5, 1.0]] * 4)
    assert count(found, expected, gaps) == (1, 2, 1)
