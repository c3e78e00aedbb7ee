"""Imported models of the Llama family keep their logits; others are refused with everything that is wrong."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
import torch
from commands import lmlong as command
from interop import tiny_llama
from interop.tiny_llama import CONFIG, LLAMA3, write_folder, write_gguf
from safetensors.torch import save

import lmlong
from lmlong.checkpoint import read
from lmlong.data.tokenizers.huggingface_file import errors_named
from lmlong.errors import CheckpointError, UsageError
from lmlong.interop.importing import import_model

TOKENS = [5, 280, 3, 299, 17, 17, 60, 1, 0, 250] * 5


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The folder of a model."""
    return write_folder(tmp_path / "source", CONFIG, tiny_llama.weights(CONFIG))


def agrees(run: Path, config: dict[str, Any], given: dict[str, torch.Tensor]) -> None:
    expected = tiny_llama.logits(config, given, TOKENS)
    for each in tiny_llama.read_both_ways(lmlong.load(run, state_dtype="32").model, TOKENS):
        assert float((each - expected).norm() / expected.norm()) < 1e-5


NULLS = dict.fromkeys(["rope_scaling", "rope_parameters", "head_dim", "hidden_act", "tie_word_embeddings"])


@pytest.mark.parametrize(
    "changes",
    [
        *({}, {"tie_word_embeddings": True}, {"rope_scaling": LLAMA3}, NULLS),
        *({"num_key_value_heads": 4}, {"num_key_value_heads": 1}),
    ],
    ids=str,
)
def test_imported_folder_has_the_same_logits(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = {**CONFIG, **changes}
    given = tiny_llama.weights(config)
    made = import_model(write_folder(tmp_path / "source", config, given), tmp_path / "run")
    assert made.parameters == sum(weight.numel() for weight in given.values()) and made.context == 64
    agrees(tmp_path / "run", config, given)


def test_several_files_in_bfloat16_have_the_same_logits(tmp_path: Path) -> None:
    given = tiny_llama.weights(CONFIG, torch.bfloat16)
    config = {key: value for key, value in CONFIG.items() if key != "rope_theta"}
    config["rope_parameters"] = {"rope_theta": 500.0, "rope_type": "default"}
    import_model(write_folder(tmp_path / "source", config, given, files=3), tmp_path / "run")
    agrees(tmp_path / "run", CONFIG, given)
    weights = read.find(tmp_path / "run") / "model.safetensors"
    assert weights.stat().st_size < 2 * sum(weight.numel() for weight in given.values()) + 8192


@pytest.mark.parametrize("tied", [False, True])
def test_gguf_file_has_the_same_logits(tmp_path: Path, tied: bool) -> None:
    config = {**CONFIG, "tie_word_embeddings": tied}
    given = tiny_llama.weights(config)
    import_model(write_gguf(tmp_path / "source.file", config, given), tmp_path / "run")
    agrees(tmp_path / "run", config, given)
    tokenizer = lmlong.load(tmp_path / "run").tokenizer
    assert tokenizer.decode(tokenizer.encode("the quick <s> \u2581 fox")) == "the quick <s> \u2581 fox"
    assert tokenizer.encode(" the") == [3 + 256 + 9 + 2]
    assert (tokenizer.bos, tokenizer.eos) == (1, 2)


def test_imported_run_is_described_and_trained_further(tmp_path: Path, source: Path) -> None:
    (tmp_path / "text.txt").write_text(tiny_llama.TEXT * 3)
    done = command("import", source, "--out", "runs/tiny", cwd=tmp_path)
    assert "33,952 parameters" in done.stdout, done.stderr
    assert "softmax" in command("info", "runs/tiny", cwd=tmp_path).stdout
    further = ("training.init_from=runs/tiny", "text.sources.0.paths=[text.txt]", "text.sequence_length=32")
    done = command("train", "adapt", *further, "training.steps=3", "--out", "runs/further", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    runs = tmp_path / "runs"
    assert lmlong.load(runs / "further").tokenizer.hash == lmlong.load(runs / "tiny").tokenizer.hash


def test_imported_run_is_neither_replaced_nor_resumed(tmp_path: Path, source: Path) -> None:
    import_model(source, tmp_path / "run")
    with pytest.raises(UsageError, match="exists"):
        import_model(source, tmp_path / "run")
    recipe = lmlong.Recipe.load(str(tmp_path / "run" / "recipe.yaml"), {"training.steps": 2})
    with pytest.raises(UsageError, match=r"imported.*training\.init_from"):
        lmlong.train(recipe, tmp_path / "run", resume="auto")


PLAIN = ("rope_theta", "hidden_size", "rms_norm_eps")


@pytest.mark.parametrize("value", ["x", 2**63, True, float("nan"), 10**400])
def test_values_of_a_wrong_type_are_named(tmp_path: Path, value: Any) -> None:
    wrong = {**dict.fromkeys(PLAIN, value), "rope_scaling": {**LLAMA3, "factor": value}}
    source = write_folder(tmp_path / "source", {**CONFIG, **wrong}, tiny_llama.weights(CONFIG))
    with pytest.raises(CheckpointError, match=r"config\.json: .*Correct the file") as caught:
        import_model(source, tmp_path / "run")
    for key in (*PLAIN, "rope_scaling.factor"):
        assert f"{key} is " in str(caught.value)


def tokenizer_json(**changes: Any) -> bytes:
    whole = json.loads(tiny_llama.byte_level().to_str())
    return json.dumps({**whole, **changes, "model": {**whole["model"], **changes.get("model", {})}}).encode()


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
DEEP: dict[str, Any] = BYTES
for _ in range(50):
    DEEP = {"type": "Sequence", "pretokenizers": [DEEP]}


SPECIAL_LETTER = {"id": 0, "content": "e", "special": True, "normalized": False} | dict.fromkeys(
    ("single_word", "lstrip", "rstrip"), False
)


def split_by(parts: list[dict[str, Any]]) -> bytes:
    return tokenizer_json(pre_tokenizer={"type": "Sequence", "pretokenizers": parts})


Craft = Callable[[Path], object]
"""Makes something wrong in a folder."""


def file(name: str, content: str | bytes) -> Craft:
    return lambda source: (source / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def config(**changes: Any) -> Craft:
    return file("config.json", json.dumps({**CONFIG, **changes}))


def pickled(source: Path) -> None:
    (source / "model.safetensors").unlink()
    (source / "pytorch_model.bin").write_bytes(pickle.dumps({}))


NOT_FINITE = {**tiny_llama.weights(CONFIG), "model.layers.1.mlp.up_proj.weight": torch.full((44, 32), torch.nan)}
ELSEWHERE = {"weight_map": {"x": "../../secret.safetensors"}}

REFUSED: list[tuple[Craft, str]] = [
    (config(architectures=["GPT2LMHeadModel"]), r"is \['GPT2LMHeadModel'\]; supported are LlamaForCausalLM, "),
    (config(attention_bias=True), "attention_bias is set"),
    (config(rope_scaling={"rope_type": "yarn", "factor": 2.0}), "scaled by 'yarn'"),
    (config(rope_scaling={"type": "llama3", "factor": 2.0}), "llama3, without low_freq_factor"),
    (config(num_hidden_layers=9999), "num_hidden_layers is 9,999, but there are weights of 2 layers"),
    (config(intermediate_size=48), r"mlp.gate_proj.weight \+ .*: \(44, 32\) \+ \(44, 32\), not \(48, 32\) \+ \(48"),
    (config(rope_parameters="\ud800"), r"rope_parameters is '\\ud800': it should be a valid dictionary"),
    (file("config.json", b"{"), "not JSON"),
    (file("model.safetensors", b"\xff" * 100), "not a safetensors file"),
    (file("tokenizer_config.json", b"["), "not valid JSON"),
    (file("tokenizer.json", b'{"model": {"type": "WordPiece", "vocab": {}}}'), "WordPiece"),
    (file("tokenizer.json", b'{"model": {"type": "BPE", "vocab": {"</s>": 0}}}'), "no tokens for single bytes"),
    (file("tokenizer.json", tokenizer_json(added_tokens=[SPECIAL_LETTER])), "'e' is also that of a byte of text"),
    (file("tokenizer.json", split_by([BYTES] * 49)), "ByteLevel occurs more than once"),
    (file("tokenizer.json", split_by([BYTES] * 51)), "not a list of up to 50 parts"),
    (file("tokenizer.json", tokenizer_json(pre_tokenizer=DEEP)), "more than 5 levels deep"),
    (file("tokenizer.json", tokenizer_json(model={"continuing_subword_prefix": "##"})), "subword_prefix is '##'"),
    (file("tokenizer.json", tokenizer_json(model={"vocab": {"a": 2**31}})), "'a' has the id 2147483648"),
    (file("tokenizer.json", tokenizer_json(model={"vocab": {"a": 7, "b": 7}})), "'a' and 'b' have the same id, 7"),
    (file("tokenizer.json", tokenizer_json(added_tokens=[{"id": 0}])), "added_tokens.0.content is missing"),
    (file("model.safetensors", save(NOT_FINITE)), "infinite or NaN values"),
    (file("model.safetensors.index.json", json.dumps(ELSEWHERE)), "is not a file of this folder"),
    (pickled, "may run code"),
]


@pytest.mark.parametrize(("craft", "message"), REFUSED, ids=range(len(REFUSED)))
def test_damaged_model_is_refused(tmp_path: Path, source: Path, craft: Craft, message: str) -> None:
    craft(source)
    with pytest.raises(CheckpointError, match=message) as refused:
        import_model(source, tmp_path / "run")
    assert str(source) in str(refused.value)
    assert os.listdir(tmp_path) == ["source"], "nothing half written"


def test_panic_of_a_library_is_an_error_of_the_file(tmp_path: Path) -> None:
    panics = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    message = r"a\.json: not a supported tokenizer\.json \(Precompiled"
    with pytest.raises(UsageError, match=message), errors_named("a.json"):
        tokenizers.Tokenizer.from_str(tokenizer_json(normalizer=panics).decode())
    with pytest.raises(KeyboardInterrupt), errors_named("a.json"):
        raise KeyboardInterrupt


def test_chat_template_may_be_a_file(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "source", CONFIG, tiny_llama.weights(CONFIG), template="old")
    (source / "chat_template.jinja").write_text("{{ 'neu' }} ä", encoding="utf-8")
    import_model(source, tmp_path / "run")
    assert lmlong.load(tmp_path / "run").tokenizer.chat_template == "{{ 'neu' }} ä"
    (source / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja beside it is not UTF-8"):
        import_model(source, tmp_path / "other")
    (source / "chat_template.jinja").unlink()
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "usual"}]
    (source / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": several}))
    import_model(source, tmp_path / "third")
    assert lmlong.load(tmp_path / "third").tokenizer.chat_template == "usual"


def test_gguf_fields_of_a_wrong_type_are_named(tmp_path: Path) -> None:
    class Wrong(gguf.GGUFWriter):
        def add_block_count(self, length: int) -> None:
            self.add_string("llama.block_count", "two")

    class Short(gguf.GGUFWriter):
        def add_token_scores(self, scores: Any) -> None:
            super().add_token_scores(scores[:5])

    for writer, message in (
        (Wrong, r"source\.gguf: llama\.block_count is 'two': it should be a valid integer"),
        (Short, r"not usable \(300 tokens and 5 scores\)"),
    ):
        source = write_gguf(tmp_path / "source.gguf", CONFIG, tiny_llama.weights(CONFIG), writer)
        with pytest.raises(CheckpointError, match=message):
            import_model(source, tmp_path / "run")


def test_all_wrong_weights_are_named(tmp_path: Path) -> None:
    given = tiny_llama.weights(CONFIG)
    del given["model.norm.weight"], given["model.layers.1.self_attn.k_proj.weight"]
    given["model.layers.0.self_attn.q_norm.weight"] = torch.ones(8)
    given["model.layers.0.mlp.down_proj.weight"] = torch.zeros(3, 3)
    with pytest.raises(CheckpointError) as caught:
        import_model(write_folder(tmp_path / "source", CONFIG, given), tmp_path / "run")
    missing = ("model.norm.weight: missing", "1.self_attn.k_proj.weight: missing")
    for part in (*missing, "q_norm.weight: unknown weight", "(3, 3), not"):
        assert part in str(caught.value)


def test_truncated_gguf_file_is_refused(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "source.gguf", CONFIG, tiny_llama.weights(CONFIG)).read_bytes()
    for size in (4, 8, 100, 5000, len(whole) // 2, len(whole) - 40):
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            import_model(tmp_path / "cut.gguf", tmp_path / "run")


def test_full_disk_leaves_nothing(tmp_path: Path, source: Path) -> None:
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, limits[1]))
    try:
        done = command("import", source, "--out", tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert done.returncode == 1, done.stderr
    assert "Nothing was imported" in done.stderr and "Traceback" not in done.stderr
    assert os.listdir(tmp_path) == ["source"]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("HuggingFaceTB/SmolLM2-135M", "HuggingFaceTB/SmolLM2-135M"),
        ("none", "OWNER/none"),
        ("models/none.gguf", "OWNER/REPOSITORY none.gguf"),
    ],
)
def test_model_name_is_not_downloaded(tmp_path: Path, path: str, name: str) -> None:
    with pytest.raises(UsageError, match=rf"{path}: no such file.*Nothing is downloaded.*hf download {name} "):
        import_model(Path(path), tmp_path / "run")


def test_pickle_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    with pytest.raises(UsageError, match="may run code"):
        import_model(tmp_path / "pytorch_model.bin", tmp_path / "run")
