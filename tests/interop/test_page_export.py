"""A model in a page, against the same model in lmlong: in Node its engine, tokenizers, sampling and state files; in
Chromium the page itself, from disk and without a network."""

import base64
import json
import math
import random
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data.tokenizer_draws import draw_text
from interop.browser import RUN_AXE, axe_source
from model.shapes import SHAPES, shaped
from models import text, write_run
from release_parts.native_code import compile_levels
from serving.schedulers import subwords
from tokenizers import Regex, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Library

import lmlong
from lmlong.data.tokenizers import load_tokenizer
from lmlong.data.tokenizers.base import ByteTokenizer, Tokenizer
from lmlong.decode.engine import step
from lmlong.decode.image import image_of
from lmlong.errors import LmlongError, UsageError
from lmlong.inference.sampling import Sampler, sample
from lmlong.interop.page import export
from lmlong.interop.page.export import export_page, layout
from lmlong.interop.page.tokenizer import page_tokenizer
from lmlong.model.base import quantize
from lmlong.model.language_model import LanguageModel
from lmlong.model.quantization import quantized
from lmlong.model.sampling_options import Sampling
from lmlong.native.prebuilt import WASM
from lmlong.native.state import state_tensors
from lmlong.recipe import Attention

NODE = shutil.which("node")
MODULE = Path(export.__file__).with_name("model.js")
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
LLAMA = WORDS + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

SPACES = [space for space in map(chr, range(0x3001)) if space.isspace()]

pytestmark = [pytest.mark.interop, pytest.mark.skipif(NODE is None, reason="there is no Node")]


@pytest.fixture(scope="module", autouse=True)
def prebuilt_step(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("prebuilt")
    try:
        list(compile_levels(folder, [WASM]))
    except (LmlongError, subprocess.CalledProcessError) as error:
        pytest.skip(f"nothing compiles to WebAssembly here: {error}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "FOLDER", folder)
        yield


def in_node(tmp_path: Path, **commands: Any) -> dict[str, Any]:
    file = tmp_path / "commands.json"
    file.write_text(json.dumps(commands))
    words = [str(NODE), str(Path(__file__).with_name("page_model.mjs")), str(file), str(MODULE)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def commands_for(model: LanguageModel, tables: Any, tokens: list[int]) -> dict[str, Any]:
    image = image_of(model, tables)
    about = {"tokenizer": page_tokenizer(ByteTokenizer()), "image": layout(model, image)}
    parts = {"wasm": base64.b64encode(export.wasm()).decode(), "weights": base64.b64encode(image.data).decode()}
    return {"about": about, "tokens": tokens, **parts}


def decoded(logits: list[str]) -> torch.Tensor:
    return torch.tensor(np.stack([np.frombuffer(base64.b64decode(each), np.float32) for each in logits]))


def logits_of(model: LanguageModel, tokens: list[int]) -> torch.Tensor:
    state, logits = model.init_state(1), []
    with torch.inference_mode():
        for token in tokens:
            each, state = step(model, torch.tensor([token]), state)
            logits.append(each[0])
    return torch.stack(logits)


def test_logits_of_every_shape_are_those_of_torch(tmp_path: Path) -> None:
    """Texts are longer than the lists of n-gram heads, or a block of a softmax layer's cache."""
    models = {name: shaped(shape) for name, shape in SHAPES.items()}
    long = {"ngram": 1200, "one head": 300, "three queries for a key": 300}
    lengths = {name: long.get(name, 25) for name in models}
    tokens = {name: text(1, length)[0].tolist() for name, length in lengths.items()}
    done = in_node(tmp_path, logits=[commands_for(model, None, tokens[name]) for name, model in models.items()])
    for (name, model), found in zip(models.items(), done["logits"], strict=True):
        logits, expected = decoded(found), logits_of(model, tokens[name])
        assert float((logits - expected).abs().max()) < 1e-4 * float(expected.abs().max()), name


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_weights_and_tables_in_integers(tmp_path: Path, form: Any) -> None:
    shape = SHAPES["hourglass and tables"] | {"width": 48}
    model, tokens = shaped(shape), text(1, 30)[0].tolist()
    assert model.ngram_embedding is not None
    with torch.no_grad():
        for table, own in ((model.embedding.weight, "int8"), (model.ngram_embedding.table, form)):
            table.copy_(quantized(table, own).dequantized())
    quantize(model, form)
    (found,) = in_node(tmp_path, logits=[commands_for(model, form, tokens)])["logits"]
    logits, expected = decoded(found), logits_of(model, tokens)
    assert float((logits - expected).norm()) < 0.02 * float(expected.norm())


def byte_level(path: Path, split: Any, **changes: Any) -> Tokenizer:
    """A tokenizer.json trained on drawn texts."""
    library, draw = Library(models.BPE(**changes)), random.Random(3)
    library.pre_tokenizer = split
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    ends = ["<|endoftext|>"]
    trainer = trainers.BpeTrainer(vocab_size=800, special_tokens=ends, initial_alphabet=alphabet, show_progress=False)
    texts = [draw_text(draw, 3000).encode("utf-8", "ignore").decode() for _ in range(20)]
    library.train_from_iterator(texts + [f"a{space}b {space}{space} c" * 999 for space in SPACES], trainer)
    library.add_tokens(["<tool>", "[[a|b]]"])
    library.save(str(path))
    return load_tokenizer(path)


def well_formed(text: str) -> str:
    """The text as JavaScript has it: two halves of a surrogate pair are one character."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


def test_tokenizers(tmp_path: Path) -> None:
    """Random texts, some longer than what is encoded at once."""
    byte_levels = pre_tokenizers.ByteLevel(add_prefix_space=False)
    without_words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    digits = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_levels])
    llama = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA), "isolated"), without_words])
    tokenizers = [ByteTokenizer(), subwords()]
    tokenizers += [byte_level(tmp_path / f"{number}.json", split) for number, split in enumerate((digits, llama))]
    draw = random.Random(1)
    texts = [well_formed(draw_text(draw, draw.randint(1, 400))) for _ in range(300)]
    texts += [f"{each}<tool>[[a|b]]<|endoftext|>ſ'S\ufdd0▁\0" for each in texts[:30]]
    texts += [texts[0] * 300, "a b\n" * 6000, "bad cab " * 5000]
    texts += [f"a{space}b {space}{space} c{space}" for space in SPACES]
    encodable = [each for each in texts if not any(0xD800 <= ord(character) < 0xE000 for character in each)]
    assert len(texts) > len(encodable) > 100, "some have halves of pairs"
    commands = [{"spec": page_tokenizer(tokenizer), "texts": texts} for tokenizer in tokenizers]
    found = in_node(tmp_path, tokenizers=commands)["tokens"]
    for tokenizer, each in zip(tokenizers, found, strict=True):
        assert each == [tokenizer.encode(text) for text in texts], type(tokenizer)


def test_tokenizers_that_a_page_lacks(tmp_path: Path) -> None:
    metaspace = pre_tokenizers.Sequence([pre_tokenizers.Punctuation(), pre_tokenizers.ByteLevel()])
    with pytest.raises(UsageError, match="a page has no pre_tokenizer Punctuation"):
        page_tokenizer(byte_level(tmp_path / "a.json", metaspace))


def test_sampling_with_the_loop_penalty(tmp_path: Path) -> None:
    """With the same random numbers, the tokens of lmlong: of logits that a text repeats, and near-repeats."""
    draw = np.random.default_rng(0)
    commands, expected = [], []
    for temperature, penalty in ((0.8, None), (0.0, 2.0), (1.3, 0.5)):
        sampler = Sampler(Sampling(temperature=temperature, loop_penalty=penalty, seed=5))
        logits = draw.standard_normal((7, 30)).astype(np.float32) * 3
        each = [logits[number % 7].tolist() for number in range(700)]
        expected.append([sample([sampler], torch.tensor([row]))[0] for row in each])
        random = Sampler(Sampling(seed=5)).random.random(len(each)).tolist()
        options = {"temperature": temperature} | ({} if penalty is None else {"loopPenalty": penalty})
        commands.append({"options": options, "random": random, "logits": each})
    assert in_node(tmp_path, samplers=commands)["drawn"] == expected


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, prebuilt_step: Any) -> tuple[Path, Path]:
    """A run, and the page of it."""
    folder = tmp_path_factory.mktemp("exported")
    attention = Attention(kind=["linear", "ngram", "window"], window=5)
    write_run(folder / "run", subwords(), width=48, layers=3, attention=attention, deviation=0.3)
    export_page(str(folder / "run"), folder / "page", "32")
    return folder / "run", folder / "page" / "index.html"


def test_module_and_state_files(tmp_path: Path, exported: tuple[Path, Path]) -> None:
    run, page = exported
    model, greedy = lmlong.load(run), {"temperature": 0.0, "max_tokens": 40}
    session = model.read("def main", heal=False)
    model.save_state(session, tmp_path / "own.state")
    done = in_node(tmp_path, page=str(page), state=str(tmp_path / "own.state"))
    assert done["restored"] == "".join(model.stream(state=session, heal=False, **greedy))
    (tmp_path / "page.state").write_bytes(base64.b64decode(done["saved"]))
    (tmp_path / "again.state").write_bytes(base64.b64decode(done["again"]))
    again = model.load_state(tmp_path / "again.state")
    pairs = zip(state_tensors(again), state_tensors(model.load_state(tmp_path / "own.state")), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    after = model.load_state(tmp_path / "page.state")
    assert done["written"] == "".join(model.stream(state=after, heal=False, **greedy)) and after.total > session.total
    assert done["text"] == "def a text of some length" and "damaged" in done["refused"]
    tokens = [model.tokenizer.bos, *model.tokenizer.encode(done["text"])]
    nats = -logits_of(model.model, tokens[:-1]).log_softmax(-1)[range(len(tokens) - 1), tokens[1:]].sum()
    assert done["bitsPerByte"] == pytest.approx(float(nats) / math.log(2) / len(done["text"]), rel=1e-4)


def test_page_in_chromium(chromium: Any, exported: tuple[Path, Path], tmp_path: Path) -> None:
    """From disk, without a network, on a narrow screen, by the keyboard."""
    context = chromium.new_context(offline=True, viewport={"width": 390, "height": 700})
    page, noted = context.new_page(), list[str]()
    page.on("console", lambda message: noted.append(message.text))
    page.on("pageerror", lambda error: noted.append(str(error)))
    page.on("request", lambda request: request.url.startswith(("file:", "blob:")) or noted.append(request.url))
    page.goto(exported[1].as_uri())
    ready = "#write:not([disabled])"
    page.wait_for_selector(ready)
    page.fill("#prompt", "cab <b>dab")
    page.press("#prompt", "Enter")
    page.wait_for_selector("#text .token >> nth=9", state="attached")
    page.wait_for_selector(ready)
    assert page.inner_text("#text").startswith("cab <b>dab") and "tokens/s" in page.inner_text("#status")
    size = page.inner_text("#text-size")
    with page.expect_download() as download:
        page.click("#save")
    download.value.save_as(tmp_path / "page.state")
    lmlong.load(exported[0]).load_state(tmp_path / "page.state")
    page.click("#new")
    page.wait_for_selector("#text-size:text-is('0 tokens')")
    page.fill("#prompt", "bad")
    page.click("#read")
    page.wait_for_selector("#text .token", state="attached")
    page.wait_for_selector(ready)
    assert page.inner_text("#text") == "bad" and "bits per byte" in page.inner_text("#status")
    page.set_input_files("#file", tmp_path / "page.state")
    page.wait_for_selector("#text .given")
    assert page.inner_text("#text-size") == size
    page.fill("input >> nth=1", "100000")
    page.fill("input >> nth=2", "0")
    page.press("#prompt", "Enter")
    page.wait_for_selector("#text .token >> nth=9", state="attached")
    page.keyboard.press("Escape")
    page.wait_for_selector(ready)
    assert page.evaluate("document.documentElement.scrollWidth") == 390 and not noted
    if source := axe_source():
        page.evaluate(source)
        assert page.evaluate(RUN_AXE) == []
    not_compiled = tmp_path / "index.html"  # as a browser without SIMD finds it
    not_compiled.write_text(re.sub('class="wasm">[^<]*', 'class="wasm">AGFzbQEAAAD/AA==', exported[1].read_text()))
    page.goto(not_compiled.as_uri())
    page.wait_for_selector("#status.error")
    assert page.inner_text("#status").startswith("This browser has no SIMD") and page.is_disabled("#write")
    context.close()


def test_export_without_the_step_names_what_makes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "run")
    monkeypatch.setattr(export, "FOLDER", tmp_path)
    with pytest.raises(UsageError, match=r"--to html: .*\.wasm is missing.* --levels wasm32"):
        export_page(str(tmp_path / "run"), tmp_path / "page")
