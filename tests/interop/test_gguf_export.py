"""Llamas exported to GGUF: the library `gguf` and lmlong's own import read what decoding computes with."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import quants
from interop.tiny_llama import CHAT, CONFIG, LLAMA3, weights, write_folder, write_gguf
from models import predict, write_run
from tokenizers import Tokenizer, pre_tokenizers
from torch import Tensor
from torch.testing import assert_close

import lmlong
from lmlong.errors import UsageError
from lmlong.interop.gguf_file import FILE, blocks, export_gguf
from lmlong.interop.importing import import_model
from lmlong.model.base import round_weights
from lmlong.model.quantization import quantized

LLAMA: dict[str, Any] = {**CONFIG, "intermediate_size": 64}
"""Sizes that are multiples of a block."""

TOKENS = torch.tensor([[5, 280, 3, 299, 17, 60, 1, 250] * 4])


def imported(folder: Path, source: str = "gguf", **changes: Any) -> Path:
    """The run of a tiny Llama, imported from a file or a folder."""
    config = {**LLAMA, **changes}
    given, path = weights(config), folder / f"source.{source}"
    write_gguf(path, config, given) if source == "gguf" else write_folder(path, config, given)
    import_model(path, folder / "run")
    return folder / "run"


@torch.inference_mode()
def logits(run: Path, rounding: Any = None) -> Tensor:
    model = lmlong.load(run, state_dtype="32").model
    round_weights(model, rounding)
    return predict(model, TOKENS)[0]


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_blocks_are_those_of_gguf(kind: Any) -> None:
    torch.manual_seed(0)
    weight = quantized(torch.randn(5, 96) * torch.logspace(-3, 1, 5)[:, None], kind)
    form = {"int4": gguf.GGMLQuantizationType.Q4_1, "int8": gguf.GGMLQuantizationType.Q8_0}[kind]
    assert np.array_equal(quants.dequantize(blocks(weight), form), weight.dequantized().numpy())


@pytest.mark.parametrize(("source", "tied"), [("gguf", True), ("folder", False)])
def test_exported_file_computes_as_the_run(tmp_path: Path, source: str, tied: bool) -> None:
    run = imported(tmp_path, source, tie_word_embeddings=tied)
    text, before = "the quick brown fox\n  12 boxing ducks", lmlong.load(run).tokenizer
    # the embedding is looked up in float16; bfloat16 rounds the matrices to 8 bits
    for kind, off in (("32", 0.0), ("bf16", 5e-2), ("int8", 3e-3), ("int4", 3e-3)):
        exported = export_gguf(str(run), tmp_path / kind, kind)  # type: ignore[arg-type]
        import_model(exported.folder / FILE, tmp_path / f"{kind}-again")
        rounding = kind if kind.startswith("int") else None
        again = tmp_path / f"{kind}-again"
        assert_close(logits(again), logits(run, rounding), rtol=0, atol=off)
        assert_close(logits(again, rounding), logits(again), rtol=0, atol=0)
        after = lmlong.load(again).tokenizer
        assert (after.encode(text), after.bos, after.eos) == (before.encode(text), before.bos, before.eos)
        assert after.chat_template == before.chat_template == (CHAT if source == "folder" else None)


def test_matrices_of_a_file_are_of_one_type(tmp_path: Path) -> None:
    """So llama.cpp reads it; a tied embedding is stored twice, for the look-up and for the output."""
    run = imported(tmp_path, tie_word_embeddings=True)
    export_gguf(str(run), tmp_path / "out", "int4")
    reader = gguf.GGUFReader(tmp_path / "out" / FILE)
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    vectors = {name: kind for name, kind in types.items() if "norm" in name}
    assert set(vectors.values()) == {"F32"} and types["token_embd.weight"] == "F16"
    assert types["output.weight"] == "Q8_0"
    rest = [kind for name, kind in types.items() if name.startswith("blk.") and name not in vectors]
    assert set(rest) == {"Q4_1"}
    assert reader.fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_Q4_1
    assert reader.fields["tokenizer.ggml.add_space_prefix"].contents() is False


PLAIN_LLAMA: dict[str, Any] = {
    **{"attention": lmlong.recipe.Attention(kind="softmax"), "convolution": 0, "output_gate": False},
    **{"head_norm": False, "embedding_scale": 1.0, "positions": "rotary", "mlp_width": 64},
}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 32}, "none of lmlong's own layers"),
        ({**PLAIN_LLAMA, "width": 48}, "--weights int4: width is 48, but GGUF needs a multiple of 32"),
        ({**PLAIN_LLAMA, "mlp_width": 40}, "inner_width is 40, but GGUF needs a multiple of 32"),
        (PLAIN_LLAMA, "its tokenizer"),
    ],
)
def test_model_that_gguf_cannot_hold_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    write_run(tmp_path / "run", **options)
    with pytest.raises(UsageError, match=message):
        export_gguf(str(tmp_path / "run"), tmp_path / "out", "int4")
    assert not (tmp_path / "out").exists()


def test_scaled_positions_and_another_split_of_words_are_refused(tmp_path: Path) -> None:
    run = imported(tmp_path, "folder", rope_scaling=LLAMA3)
    with pytest.raises(UsageError, match=r"model\.rope\.scaling is not exported to GGUF"):
        export_gguf(str(run), tmp_path / "out")
    folder = write_folder(tmp_path / "source", LLAMA, weights(LLAMA))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    split = [pre_tokenizers.Punctuation(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    tokenizer.save(str(folder / "tokenizer.json"))
    import_model(folder, tmp_path / "other")
    with pytest.raises(UsageError, match="does not split words"):
        export_gguf(str(tmp_path / "other"), tmp_path / "out")
