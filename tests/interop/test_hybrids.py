"""Qwen3.5, OLMo-Hybrid and LFM2 compute the same as in transformers, and come back as they were."""

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from interop.tiny_hybrids import HYBRIDS, architecture_of, bf16, source, write_hybrid, write_qwen_gguf
from interop.tiny_llama import byte_level, write_folder
from models import predict
from safetensors.torch import load_file
from torch import Tensor
from torch.testing import assert_close

import lmlong
from lmlong.errors import CheckpointError
from lmlong.inference.loading import TrainedLanguageModel
from lmlong.interop.hf.config import weights_of
from lmlong.interop.hf.export import export_hf
from lmlong.interop.importing import import_model

each_hybrid = pytest.mark.parametrize("name", HYBRIDS)

TEXT = torch.randint(1, 300, (2, 150), generator=torch.Generator().manual_seed(0))
"""Longer than two chunks of 64 tokens."""


@each_hybrid
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_import_and_export_change_no_bit(tmp_path: Path, name: str, stored: str) -> None:
    config, weights = source(name)
    weights = weights if stored == "float32" else bf16(weights)
    import_model(write_folder(tmp_path / "source", config, weights), tmp_path / "run")
    assert export_hf(str(tmp_path / "run"), tmp_path / "back").architecture == name
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == weights.keys()
    for key, weight in weights.items():
        assert back[key].dtype == weight.dtype
        assert torch.equal(back[key], weight), key
    architecture, again = architecture_of(name), json.loads((tmp_path / "back" / "config.json").read_text())
    given, made = (architecture.options(architecture.config.model_validate(each)) for each in (config, again))
    assert lmlong.recipe.Model(**given) == lmlong.recipe.Model(**made)


@each_hybrid
@pytest.mark.parametrize("weights", ["32", "int4"])
def test_native_code_and_torch_write_the_same_text(tmp_path: Path, name: str, weights: Any) -> None:
    import_model(write_hybrid(tmp_path / "source", name), tmp_path / "run")
    model = lmlong.load(tmp_path / "run", weights=weights, state_dtype="32")
    texts = []
    for is_fast in (True, False):
        model.use_fast_engine(is_fast)
        texts.append("".join(model.stream("The quick brown", max_tokens=60, temperature=0)))
    assert texts[0] == texts[1]
    assert texts[0]


def test_vision_and_several_tokens_are_left_out(tmp_path: Path) -> None:
    name = "Qwen3_5ForCausalLM"
    config, weights = source(name)
    extra = {"model.visual.x.weight": torch.zeros(3), "mtp.y.weight": torch.zeros(2), "mtp.z": torch.zeros(2)}
    nested = {key.replace("model.", "model.language_model.", 1): weight for key, weight in weights.items()}
    whole = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": config, "tie_word_embeddings": True}
    folder = write_folder(tmp_path / "source", whole, {**nested, **extra})
    imported = import_model(folder, tmp_path / "run")
    assert sorted(imported.left_out) == ["1 weights of vision", "2 weights that predict several tokens"]
    assert imported.parameters == sum(weight.numel() for weight in weights.values())


def rounded(name: str, weight: Tensor, kind: gguf.GGMLQuantizationType) -> Tensor:
    """Return a weight with the values that a file has."""
    if weight.ndim != 2:
        return weight
    return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), kind), kind))


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0", "Q4_1", "Q4_0"])
def test_gguf_file_has_the_weights_of_the_folder(tmp_path: Path, kind: str) -> None:
    """Heads of values have the size of a block, so that they are moved as they are rounded."""
    config, weights = source("Qwen3_5ForCausalLM", hidden_size=64, intermediate_size=64, linear_value_head_dim=32)
    quantization = gguf.GGMLQuantizationType[kind]
    file = write_qwen_gguf(tmp_path / "m.gguf", config, weights, quantization)
    weights = {name: rounded(name, weight, quantization) for name, weight in weights.items()}
    import_model(write_folder(tmp_path / "source", config, weights), tmp_path / "folder")
    import_model(file, tmp_path / "run")
    expected, found = (lmlong.load(tmp_path / name).model.state_dict() for name in ("folder", "run"))
    for name, weight in expected.items():
        assert_close(found[name], weight, rtol=0, atol=1e-6, msg=lambda why, name=name: f"{name}: {why}")


def test_layers_of_more_tokens_are_left_out_of_a_gguf_file(tmp_path: Path) -> None:
    config, weights = source("Qwen3_5ForCausalLM")
    more = {"blk.5.nextn.eh_proj.weight": torch.zeros(48, 96), "blk.5.attn_norm.weight": torch.zeros(48)}
    file = write_qwen_gguf(tmp_path / "m.gguf", config, weights, more=more)
    assert import_model(file, tmp_path / "run").left_out == ["2 weights that predict several tokens"]
    assert lmlong.load(tmp_path / "run").recipe.model.layers == config["num_hidden_layers"]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("Qwen3_5ForCausalLM", {"architectures": ["Qwen3_5MoeForCausalLM"]}, "mixtures of experts are not supported"),
        ("Qwen3_5ForCausalLM", {"layer_types": ["mamba"] * 5}, "layer_types has 'mamba'; known are linear_attention"),
        ("Qwen3_5ForCausalLM", {"layer_types": ["full_attention"]}, "names 1 layers, and there are 5"),
        ("Qwen3_5ForCausalLM", {"rope_parameters": {"rope_type": "yarn"}}, "scaled by 'yarn'"),
        ("Qwen3_5ForCausalLM", {"linear_num_value_heads": 5}, "2 do not divide the 5 heads of delta"),
        ("OlmoHybridForCausalLM", {"attention_bias": True}, "attention_bias is set"),
        ("OlmoHybridForCausalLM", {"linear_value_head_dim": 21}, r"q_conv1d.* \+ .*v_conv1d"),
        ("Lfm2ForCausalLM", {"conv_bias": True}, "conv_bias is set"),
        ("Lfm2ForCausalLM", {"hidden_act": "gelu"}, "gated by 'gelu'"),
        ("Lfm2ForCausalLM", {"conv_L_cache": 4}, r"conv.conv.weight: \(48, 1, 3\), not \(48, 1, 4\)"),
    ],
)
def test_unsupported_hybrid_is_refused(tmp_path: Path, name: str, changes: dict[str, Any], message: str) -> None:
    folder = write_hybrid(tmp_path / "source", name, **changes)
    with pytest.raises(CheckpointError, match=message):
        import_model(folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def transformers() -> Any:
    """transformers, whose hybrids compute by torch: its kernels of flash-linear-attention need a GPU."""
    pytest.importorskip("transformers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "fla", None)
        import transformers
        from transformers.models.lfm2 import modeling_lfm2
        from transformers.models.olmo_hybrid import modeling_olmo_hybrid
        from transformers.models.qwen3_5 import modeling_qwen3_5

        assert modeling_lfm2 and modeling_olmo_hybrid and modeling_qwen3_5
        yield transformers


Pair = tuple[TrainedLanguageModel, Any]


@pytest.fixture(scope="module")
def pair(transformers: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """Return a random model that transformers makes and saves, imported, and the model itself."""

    @cache
    def of_class(name: str) -> Pair:
        folder, values = tmp_path_factory.mktemp("hybrids"), dict(HYBRIDS[name])
        theirs = getattr(transformers, name)
        torch.manual_seed(0)
        model = theirs(theirs.config_class(**{key: value for key, value in values.items() if key != "model_type"}))
        with torch.no_grad():
            for key, weight in model.named_parameters():
                if not key.endswith(("A_log", "dt_bias")):
                    weight.add_(0.05 * torch.randn_like(weight))
        model.eval().save_pretrained(folder / "source")
        byte_level().save(str(folder / "source" / "tokenizer.json"))
        ends = {"bos_token": "<s>", "eos_token": "</s>"}
        (folder / "source" / "tokenizer_config.json").write_text(json.dumps(ends))
        import_model(folder / "source", folder / "run")
        return lmlong.load(folder / "run", state_dtype="32"), model

    return of_class


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@each_hybrid
def test_logits_and_steps_are_those_of_transformers(pair: Callable[[str], Pair], name: str) -> None:
    ours, theirs = pair(name)
    with torch.inference_mode():
        expected, (at_once, _) = theirs(TEXT).logits, predict(ours.model, TEXT)
        state, steps = ours.model.init_state(len(TEXT)), []
        for token in TEXT.T:
            logits, state = ours.model.step(token, state)
            steps.append(logits)
    assert relative(at_once, expected) < 1e-4
    assert relative(torch.stack(steps, 1), expected) < 1e-4


@each_hybrid
def test_greedy_text_is_that_of_transformers(pair: Callable[[str], Pair], name: str) -> None:
    ours, theirs = pair(name)
    prompt = TEXT[:1, :70]
    how = {"max_new_tokens": 200, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = theirs.generate(prompt, **how)[0, 70:].tolist()
    ours.use_fast_engine(True)
    engine = ours.model.engine
    row, written = engine.load(ours.model.init_state(1)), []
    with torch.inference_mode():
        for token in prompt[0].tolist():
            logits = engine.step([row], [token])
        for _ in range(200):
            written.append(int(logits.argmax()))
            logits = engine.step([row], [written[-1]])
    assert written == expected


@each_hybrid
def test_padded_rows_are_those_of_transformers(pair: Callable[[str], Pair], name: str) -> None:
    ours, theirs = pair(name)
    padded, mask = TEXT.clone(), torch.ones_like(TEXT)
    padded[1, :60], mask[1, :60] = 0, 0
    with torch.inference_mode():
        expected = theirs(padded, attention_mask=mask).logits[1, 60:]
        alone, _ = predict(ours.model, TEXT[1:, 60:])
    assert relative(alone[0], expected) < 1e-4


@each_hybrid
def test_gradients_are_those_of_transformers(pair: Callable[[str], Pair], name: str) -> None:
    ours, theirs = pair(name)
    model = ours.model
    theirs.zero_grad()
    theirs(TEXT, labels=TEXT).loss.backward()
    model.zero_grad()
    with torch.enable_grad():
        hidden, _ = model(TEXT)
        (model.loss(hidden[:, :-1], TEXT[:, 1:]) / TEXT[:, 1:].numel()).backward()
    gradients = {key: weight.grad for key, weight in model.named_parameters() if weight.grad is not None}
    assert gradients.keys() == {key for key, _ in model.named_parameters()}
    named = weights_of(gradients, architecture_of(name), ours.recipe.model)
    their_gradients = {key: weight.grad for key, weight in theirs.named_parameters()}
    largest = max(float(each.abs().max()) for each in their_gradients.values())
    matched = 0
    for key, found in named.items():
        if key in their_gradients:  # OLMo's convolutions and norms have other names in memory than in files
            matched += 1
            assert float((found - their_gradients[key]).abs().max()) < 1e-4 * largest, key
    assert matched > 0.7 * len(named)


@each_hybrid
def test_bfloat16_is_as_exact_as_in_transformers(pair: Callable[[str], Pair], name: str) -> None:
    ours, theirs = pair(name)
    with torch.inference_mode():
        expected = theirs(TEXT).logits
        rounded = theirs.to(torch.bfloat16)(TEXT).logits.float()
        theirs.float()
        quantized = lmlong.load(ours.checkpoint, weights="bf16", state_dtype="32")
        found, _ = predict(quantized.model, TEXT)
    assert (found - expected).square().mean() <= (rounded - expected).square().mean()
