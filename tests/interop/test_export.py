"""Models exported to transformers have the same logits, texts and tokens there."""

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from commands import lmlong as command
from data.tokenizer_draws import draw_text
from evaluation.harness_models import KINDS, greedy
from inference.test_loops import find_loop, write_looping_run
from interop import tiny_llama
from interop.tiny_llama import CONFIG, LLAMA3, write_folder
from models import FORMS, predict, text, write_run
from torch import Tensor

import lmlong
from lmlong import recipe
from lmlong.attention.plugins import load_plugin, unload_plugin
from lmlong.checkpoint import read
from lmlong.data.tokenizers import train_tokenizer
from lmlong.data.tokenizers.base import ByteTokenizer
from lmlong.data.tokenizers.characters import CharacterTokenizer
from lmlong.data.tokenizers.sentencepiece import SentencePieceTokenizer
from lmlong.errors import CheckpointError, LmlongError, UsageError
from lmlong.interop.hf.config import lmlong_weights
from lmlong.interop.hf.export import export_hf
from lmlong.interop.importing import import_model
from lmlong.model.language_model import LanguageModel
from lmlong.model.ngram_embedding import RowGradients
from lmlong.model.sampling_options import DEFAULTS

PROMPTS = (150, 90, 31)
"""Tokens of prompts that are read as one batch."""

TWO_GATES = Path(__file__).parents[1] / "plugins" / "two_gates.py"

PROMPT_IDS = torch.tensor([[5, 280, 3, 299, 17, 17, 60, 1, 250] * 5])

OPTIONS = {**KINDS, "added heads": {**FORMS["softmax"], "add_ngram": [1]}}

USUAL = {"elu", "relu", "softmax", "tables", "hourglass"}
"""A decay that is not in the file, states that grow, tables and blocks. An export runs lmlong's own model, so that of
other forms is slow."""

every_form = pytest.mark.parametrize(
    "form", [pytest.param(form, marks=[] if form in USUAL else pytest.mark.slow) for form in OPTIONS]
)


class Export(NamedTuple):
    """A model and its export."""

    model: LanguageModel
    folder: Path


@pytest.fixture(scope="module")
def transformers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    found = pytest.importorskip("transformers")
    from transformers import dynamic_module_utils

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        yield found


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Export]:
    """Return the export of a form, made at its first use."""
    folder = tmp_path_factory.mktemp("exports")

    @cache
    def of_form(form: str) -> Export:
        model = write_run(folder / form / "run", **OPTIONS[form])
        export_hf(str(folder / form / "run"), folder / form / "hf")
        return Export(model, folder / form / "hf")

    return of_form


@pytest.mark.interop
@every_form
def test_transformers_has_the_same_logits_texts_and_gradients(
    transformers: Any, export: Callable[[str], Export], form: str
) -> None:
    original, folder = export(form)
    exported = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    ids = text(len(PROMPTS), PROMPTS[0])
    padded, mask = left_padded(ids)
    with torch.no_grad():
        expected, _ = predict(original, ids)
        assert apart(exported(ids).logits, expected) < 1e-5
        assert apart(in_pieces(exported, ids), expected) < 1e-5
        rows = zip(exported(padded, attention_mask=mask).logits, expected, PROMPTS, strict=True)
        assert all(apart(row[-size:], alone[:size]) < 1e-5 for row, alone, size in rows)

    options = {"attention_mask": mask, "do_sample": False, "eos_token_id": -1}
    written = exported.generate(padded, max_new_tokens=12, **options)
    for row, prompt, size in zip(written, ids, PROMPTS, strict=True):
        assert row[-12:].tolist() == greedy(original, prompt[:size].tolist(), 12)
    beams = {"num_beams": 3, "max_new_tokens": 6, "do_sample": False, "eos_token_id": -1}
    alone, *_ = exported.generate(padded[1:2, -90:], **beams)
    assert alone[-6:].tolist() == by_beams(original, ids[1, : PROMPTS[1]], 3, 6)
    assert exported.generate(padded, attention_mask=mask, **beams)[1, -6:].tolist() == alone[-6:].tolist()
    assert exported.generate(padded, attention_mask=mask, do_sample=True, max_new_tokens=4).shape == (3, 154)

    exported.train()(ids, labels=ids).loss.backward()
    original.zero_grad()
    if tables := original.ngram_embedding:
        tables.gradients = RowGradients(len(tables.table), reads_values=True)
    logits, _ = predict(original, ids)
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    found = {name: weight.grad for name, weight in exported.named_parameters()}
    gradients = {name: weight.grad for name, weight in original.named_parameters() if weight.grad is not None}
    if tables and tables.gradients:
        rows = tables.gradients.take()
        gradients["ngram_embedding.table"] = torch.zeros_like(tables.table).index_add_(0, rows.rows, rows.gradient)
        tables.gradients = None
    wanted = lmlong_weights(gradients)
    assert found.keys() == wanted.keys() and all(weight.abs().max() > 0 for weight in wanted.values())
    assert {name for name, weight in wanted.items() if apart(found[name], weight) > 1e-4} == set()


def apart(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest logit."""
    return float((found - expected).abs().max() / expected.abs().max())


def in_pieces(model: Any, ids: Tensor) -> Tensor:
    """Logits of a text read in pieces of several sizes, from the state after those before."""
    cache, logits = None, []
    for piece in ids.split([70, 1, 1, 9, 1, 68], dim=1):
        read = model(piece, cache=cache)
        cache = read.cache
        logits.append(read.logits)
    return torch.cat(logits, dim=1)


def left_padded(ids: Tensor) -> tuple[Tensor, Tensor]:
    padded, mask = torch.full_like(ids, 257), torch.zeros_like(ids)
    for row, size in enumerate(PROMPTS):
        padded[row, -size:], mask[row, -size:] = ids[row, :size], 1
    return padded, mask


@torch.no_grad()
def by_beams(model: Any, prompt: Tensor, beams: int, count: int) -> list[int]:
    """The likeliest of the texts that are kept, each read again for each token."""
    kept, scores = prompt[None], torch.zeros(1)
    for _ in range(count):
        sums = scores[:, None] + predict(model, kept)[0][:, -1].log_softmax(-1)
        scores, best = sums.flatten().topk(beams)
        kept = torch.cat([kept[best // sums.shape[1]], best[:, None] % sums.shape[1]], dim=1)
    return kept[0, -count:].tolist()


@pytest.mark.interop
@torch.no_grad()
def test_plugin_is_loaded_before_its_model(tmp_path: Path, transformers: Any) -> None:
    load_plugin(TWO_GATES)
    try:
        original = write_run(tmp_path / "run", attention={"kind": "two_gates"})
        export_hf(str(tmp_path / "run"), tmp_path / "hf")
        exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", trust_remote_code=True)
        assert apart(exported(text(2, 40)).logits, predict(original, text(2, 40))[0]) < 1e-5
    finally:
        unload_plugin(TWO_GATES)
    with pytest.raises(LmlongError, match="two_gates"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", trust_remote_code=True)


@pytest.mark.interop
def test_exported_defaults_write_no_loop(tmp_path: Path, transformers: Any) -> None:
    write_looping_run(tmp_path / "run")
    export_hf(str(tmp_path / "run"), tmp_path / "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", trust_remote_code=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf", trust_remote_code=True)
    chosen = model.generation_config
    assert (chosen.do_sample, chosen.temperature, chosen.top_k, chosen.top_p) == (True, DEFAULTS.temperature, 0, 1.0)

    inputs = tokenizer(["klm"] * 5, return_tensors="pt")
    transformers.set_seed(0)
    texts = tokenizer.batch_decode(model.generate(**inputs, max_new_tokens=100), skip_special_tokens=True)
    assert len(set(texts)) == 5 and not any(map(find_loop, texts))
    looping = model.generate(**inputs, max_new_tokens=100, loop_penalty=0)
    assert all(map(find_loop, tokenizer.batch_decode(looping, skip_special_tokens=True)))


@pytest.mark.interop
def test_rewinding_generation_is_refused(transformers: Any, export: Callable[[str], Export]) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(export("elu").folder, trust_remote_code=True)
    prompt = torch.tensor([[1, 2, 1, 2, 1]])
    with pytest.raises(ValueError, match="assisted generation is not supported"):
        model.generate(prompt, max_new_tokens=2, prompt_lookup_num_tokens=2)
    state = model.generate(prompt, max_new_tokens=2, return_dict_in_generate=True)
    cache = state.get("cache", state.get("past_key_values"))
    assert not cache.is_croppable
    with pytest.raises(ValueError, match="Read the shorter text from its beginning"):
        cache.crop(-1)


@pytest.mark.interop
@pytest.mark.parametrize("count", [80, pytest.param(1200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["bytes", "characters", "bpe", "unigram", "huggingface"])
def test_hostile_strings_have_the_same_tokens(tmp_path: Path, transformers: Any, kind: str, count: int) -> None:
    """Of unigram ties, as runs of one letter are, may be cut otherwise: the scores of the tokens are the same. Literal
    U+2581, which sentencepiece has for a space, halves of surrogate pairs and NUL are told apart by lmlong alone."""
    draw = random.Random(0)
    if kind == "huggingface":
        import_model(write_folder(tmp_path / "exported", CONFIG, tiny_llama.weights(CONFIG)), tmp_path / "run")
        original = lmlong.load(tmp_path / "run").tokenizer
    else:
        untrained = {"bytes": ByteTokenizer(), "characters": CharacterTokenizer("abdefinorstu <>/中é\n", "replace")}
        options = {"vocabulary": 500, "algorithm": kind}
        original = untrained.get(kind) or train_tokenizer(
            [draw_text(draw, 400) for _ in range(100)], recipe.Tokenizer.model_validate(options)
        )
        write_run(tmp_path / "run", original, **FORMS["elu"])
    export_hf(str(tmp_path / "run"), tmp_path / "hf")
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf", trust_remote_code=True)
    wrong, lossy = [], []
    for _ in range(count):
        string = draw_text(draw, draw.randint(1, 300))
        string = "".join(one for one in string if one not in "\u2581\0" and not "\ud800" <= one <= "\udfff")
        found = exported(string, add_special_tokens=False)["input_ids"]
        assert exported(string)["input_ids"] == [original.bos, *found]
        if found != original.encode(string):
            wrong.append(string)
        kept = original.representable(string)
        if original.decode(found) != kept or exported.decode(found) != kept:
            lossy.append(string)
    assert not lossy and (kind == "unigram" or not wrong)
    for string in wrong:
        assert isinstance(original, SentencePieceTokenizer)
        both = exported(string, add_special_tokens=False)["input_ids"], original.encode(string)
        one, other = (sum(map(original.processor.get_score, tokens)) for tokens in both)
        assert one == pytest.approx(other)


@pytest.mark.interop
def test_unknown_character_is_an_error_in_transformers(tmp_path: Path, transformers: Any) -> None:
    write_run(tmp_path / "run", CharacterTokenizer("ACGT"), **FORMS["elu"])
    export_hf(str(tmp_path / "run"), tmp_path / "hf")
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf", trust_remote_code=True)
    assert exported("GATTACA")["input_ids"] == [4, 2, 0, 3, 3, 0, 1, 0]
    with pytest.raises(Exception, match="UNK"):
        exported("GATTAXA")


@pytest.mark.interop
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"rope_scaling": LLAMA3}], ids=str)
@torch.no_grad()
def test_imported_llama_is_exported_as_a_llama_and_read_from_either_program(
    tmp_path: Path, transformers: Any, changes: dict[str, Any]
) -> None:
    config = {**CONFIG, **changes}
    import_model(write_folder(tmp_path / "exported", config, tiny_llama.weights(config)), tmp_path / "run")
    assert export_hf(str(tmp_path / "run"), tmp_path / "hf").architecture == "LlamaForCausalLM"
    assert not list((tmp_path / "hf").glob("*.py"))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    expected, _ = predict(lmlong.load(tmp_path / "run", state_dtype="32").model, PROMPT_IDS)
    assert float((model(PROMPT_IDS).logits - expected).norm() / expected.norm()) < 1e-5

    model.save_pretrained(tmp_path / "theirs", max_shard_size="50KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists()
    shutil.copy(tmp_path / "hf" / "tokenizer.json", tmp_path / "theirs")
    for source in ("hf", "theirs"):
        import_model(tmp_path / source, tmp_path / f"{source}-again")
        again, _ = predict(lmlong.load(tmp_path / f"{source}-again", state_dtype="32").model, PROMPT_IDS)
        assert torch.equal(again, expected)


def test_encoder_and_damaged_checkpoint_are_not_exported_and_other_folders_are_kept(tmp_path: Path) -> None:
    write_run(tmp_path / "encoder", objective="masked", attention={"kind": "linear", "decay": "none"}, convolution=0)
    with pytest.raises(UsageError, match="encoder"):
        export_hf(str(tmp_path / "encoder"), tmp_path / "export")
    write_run(tmp_path / "run", **FORMS["elu"])
    for other in ("out", ".export.partial"):
        (tmp_path / other).mkdir()
        (tmp_path / other / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="not empty"):
        export_hf(str(tmp_path / "run"), tmp_path / "out")
    export_hf(str(tmp_path / "run"), tmp_path / "export")
    assert os.listdir(tmp_path / ".export.partial") == os.listdir(tmp_path / "out") == ["mine.txt"]

    weights = read.find(tmp_path / "run") / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="not what was saved"):
        export_hf(str(tmp_path / "run"), tmp_path / "again")
    assert sorted(os.listdir(tmp_path)) == [".export.partial", "encoder", "export", "out", "run"]


def test_card_has_training_text_and_evaluation(tmp_path: Path) -> None:
    write_run(tmp_path / "run", **FORMS["delta"])
    text = {"sources": [{"train": {"documents": 582, "tokens": 2_589_600}, "validation": {"tokens": 104_156}}]}
    (tmp_path / "run" / "environment.json").write_text(json.dumps({"text": text}))
    (tmp_path / "text.txt").write_text(tiny_llama.TEXT * 3)
    words = ("--data", "text.txt", "--lengths", "16,64", "--min-documents", "1", "--json", "told.json")
    assert command("eval", "run", *words, cwd=tmp_path).returncode == 0
    words = ("--to", "hf", "--out", "hf", "--evaluation", "told.json")
    assert "LmlongForCausalLM" in command("export", "run", *words, cwd=tmp_path).stdout
    card = (tmp_path / "hf" / "README.md").read_text()
    bits = [at["bits_per_byte"] for at in json.loads((tmp_path / "told.json").read_text())["runs"][0]["context"]]
    assert len(bits) == 2 and all(f"| {bit:.3f} |" in card for bit in bits)
    facts = ("12,345 tokens", "1.500 bits per byte", "delta", "| python-stdlib | 582 | 2,589,600 | 104,156 |")
    for expected in (*facts, "trust_remote_code=True"):
        assert expected in card
    assert str(tmp_path) not in card
    files = {path.name for path in (tmp_path / "hf").iterdir()}
    assert files >= {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "README.md"}
    assert "`pip install lmlong`" in card.split("#", 1)[1].splitlines()[2]


@pytest.mark.interop
@torch.no_grad()
def test_folder_saved_again_is_the_same_model(
    tmp_path: Path, transformers: Any, export: Callable[[str], Export]
) -> None:
    _, folder = export("hyperbolic")
    first = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    first.save_pretrained(tmp_path / "again")
    transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True).save_pretrained(tmp_path / "again")
    second = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again", trust_remote_code=True)
    assert torch.equal(first(text(2, 40)).logits, second(text(2, 40)).logits)
    named = transformers.AutoTokenizer.from_pretrained(tmp_path / "again", trust_remote_code=True)
    assert named("aé<s>")["input_ids"] == [256, *"aé<s>".encode()]
