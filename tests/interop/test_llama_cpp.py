"""Llamas exported to GGUF, run by llama.cpp: its log-probabilities are those of lmlong with the same rounded matrices.

V vocabulary.
"""

import json
from pathlib import Path

import pytest
import torch
from interop.test_gguf_export import imported
from interop.tiny_hybrids import source, write_qwen_gguf
from interop.tiny_llama import PIECES
from models import predict
from torch import Tensor

import lmlong
from lmlong.interop.gguf_file import FILE, export_gguf
from lmlong.interop.importing import import_model
from lmlong.model.base import round_weights
from lmlong.model.quantization import Weights

xllamacpp = pytest.importorskip("xllamacpp", reason="pip install -e '.[interop]'", exc_type=ImportError)

TEXT = "the quick brown fox\n  12 boxing ducks"

OFF = {"32": 1e-2, "bf16": 0.1, "int8": 0.1, "int4": 0.1}
"""Most that a log-probability may differ: llama.cpp keeps keys and values in float16, and rounds activations to 8 bits
where matrices are integers."""


def by_llama_cpp(file: Path, prompt: str | list[int], vocabulary: int, written: int) -> Tensor:
    """Return the log-probabilities (V,) of the token after a prompt. The token `written` follows, whatever they are: a
    whole character, since llama.cpp shows none beside a part of one."""
    options = xllamacpp.CommonParams()
    options.model.path, options.n_ctx, options.cpuparams.n_threads = str(file), 64, 1
    server = xllamacpp.Server(options)
    asked = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "n_probs": vocabulary, "logit_bias": [[written, 1e4]]}
    answer = server.handle_completions(asked)
    answer = json.loads(answer) if isinstance(answer, str) else answer
    (token,) = answer["choices"][0]["logprobs"]["content"]
    found = torch.full((vocabulary,), torch.nan)
    for each in token["top_logprobs"]:
        found[each["id"]] = each["logprob"]
    return found


@torch.inference_mode()
def by_lmlong(run: Path, tokens: list[int], weights: Weights) -> Tensor:
    model = lmlong.load(run, state_dtype="32").model
    if weights in ("int4", "int8"):
        round_weights(model, weights)
    return predict(model, torch.tensor([tokens]))[0][0, -1].log_softmax(-1)


@pytest.mark.parametrize("weights", ["32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("source", ["gguf", "folder"])
def test_llama_cpp_predicts_the_same(tmp_path: Path, source: str, weights: Weights) -> None:
    run = imported(tmp_path, source)
    file = export_gguf(str(run), tmp_path / "out", weights).folder / FILE
    tokenizer = lmlong.load(run).tokenizer
    tokens = [tokenizer.bos, *tokenizer.encode(TEXT)]
    expected = by_lmlong(run, tokens, weights)
    for prompt in (tokens, TEXT):  # a text is encoded by llama.cpp
        found = by_llama_cpp(file, prompt, len(expected), tokenizer.encode("a")[-1])
        assert float((found - expected).abs().max()) < OFF[weights]
    if weights == "int4":  # and not without rounding
        assert float((found - by_lmlong(run, tokens, "32")).abs().max()) > 2 * OFF[weights]


@pytest.mark.parametrize("values", [2, 6])
def test_llama_cpp_predicts_the_same_as_an_imported_qwen(tmp_path: Path, values: int) -> None:
    sizes = {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_value_heads": values}
    config, weights = source("Qwen3_5ForCausalLM", num_hidden_layers=4, **sizes)
    file = write_qwen_gguf(tmp_path / "m.gguf", config, weights)
    import_model(file, tmp_path / "run")
    tokens = [1, *torch.randint(3, 300, (30,), generator=torch.Generator().manual_seed(0)).tolist()]
    found = by_llama_cpp(file, tokens, config["vocab_size"], PIECES.index("he"))
    assert float((found - by_lmlong(tmp_path / "run", tokens, "32")).abs().max()) < OFF["32"]
