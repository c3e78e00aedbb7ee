"""Every weight format, with and without learning while reading, in every command, for every kind of model.

Each command must agree with the definition: the hidden states of the whole text, an output layer that learns as
`naive_read` says, and steps in torch.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from math import log
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from commands import lmlong
from grids import thinned
from interop import tiny_llama
from models import FORMS, write_run
from serving.servers import served
from torch.nn.functional import cross_entropy

import lmlong as library
from lmlong.attention.plugins import load_plugin, unload_plugin
from lmlong.inference import loading
from lmlong.inference.loading import TrainedLanguageModel
from lmlong.interop.importing import import_model
from lmlong.model.learning.naive import naive_read
from lmlong.model.learning.state import DEFAULT_RATES, init_learned
from lmlong.model.quantization import Weights
from lmlong.model.sampling_options import Sampling
from lmlong.native.state import map_state
from lmlong.recipe import Downsample
from lmlong.serving.session_store import SessionStore
from lmlong.serving.settings import Settings

TEXT = "The quick brown fox jumps over the lazy dog. " * 4 + "Two wizards quickly jump past five boxing ducks."
MORE = " The quick brown fox jumps past the lazy ducks."
TOKENS = 24
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": TOKENS}
TWO_GATES = str(Path(__file__).parent / "plugins" / "two_gates.py")

TOLERANCE = {"32": 1e-5, "bf16": 1e-5, "int8": 5e-3, "int4": 5e-3}
"""Relative, of the nats of a text: products of int8 and int4 round what they read, in groups that differ by command."""


MODELS: dict[str, dict[str, Any]] = {
    "linear": FORMS["elu"],
    **{form: FORMS[form] for form in ("ngram", "tables", "delta", "own heads")},
    "window with sink": FORMS["sink"],
    "hourglass": {"layers": 3, "downsample": Downsample(factor=4), **FORMS["elu"]},
    "imported": {},
    "plug-in": {"attention": {"kind": "two_gates"}},
}


@pytest.fixture(scope="module", autouse=True)
def plugin() -> Iterator[None]:
    load_plugin(TWO_GATES)
    yield
    unload_plugin(TWO_GATES)


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("runs")

    @cache
    def run(name: str) -> Path:
        path = folder / name
        if name == "imported":
            given = tiny_llama.weights(tiny_llama.CONFIG)
            import_model(tiny_llama.write_folder(folder / "llama", tiny_llama.CONFIG, given), path)
        else:
            write_run(path, **MODELS[name])
        return path

    return run


def nats_by_definition(trained: TrainedLanguageModel, *end: int) -> float:
    """Return the summed -log p of the tokens of TEXT and of those at its end."""
    model, tokenizer = trained.model, trained.tokenizer
    tokens = torch.tensor([tokenizer.bos, *tokenizer.encode(TEXT), *end])
    with torch.no_grad():
        hidden = model(tokens[None, :-1])[0][0]
        if not trained.learn:
            return float(cross_entropy(model.logits(hidden), tokens[1:], reduction="sum"))
        delta = map_state(lambda x: x[0], init_learned(torch.zeros(1), model.embedding.weight).delta)
        is_learned = torch.ones(len(hidden), dtype=torch.bool)
        matrix = model.lm_head.matrix(torch.float32)
        nll, _ = naive_read(matrix, delta, hidden, tokens[1:], is_learned, DEFAULT_RATES.for_hidden(model.norm.weight))
    return float(nll.sum())


@thinned(
    pytest.mark.parametrize("name", MODELS),
    pytest.mark.parametrize("weights", get_args(Weights)),
    pytest.mark.parametrize("learn", [False, True], ids=["plain", "learning"]),
)
def test_all_commands_agree_with_the_definition(
    run_of: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    weights: Weights,
    learn: bool,
) -> None:
    run, file, state = run_of(name), tmp_path / "text.txt", tmp_path / "text.state"
    file.write_text(TEXT)
    model = library.load(run, weights=weights, state_dtype="32", learn=learn)
    exact = ("--weights", weights)
    monkeypatch.setattr(loading, "CACHE_DTYPE", torch.float32)

    def command(command: str, *words: object, learns: bool = learn) -> str:
        options = [*(["--learn"] if learns else []), "--plugin", TWO_GATES]
        finished = lmlong(*command.split(), run, *words, *options)
        assert finished.returncode == 0, finished.stderr
        return finished.stdout

    def generated(*words: object, learns: bool = learn) -> str:
        return command("generate", "--temperature", 0, "--max-tokens", TOKENS, *exact, *words, learns=learns)

    nats = pytest.approx(nats_by_definition(model), rel=TOLERANCE[weights])
    (line,) = map(json.loads, command("score", file, *exact).splitlines())
    assert line["bits"] * log(2) == nats
    measured = json.loads(command("eval", "--data", file, "--by", "position", "--min-documents", 1, "--json", *exact))
    positions = measured["runs"][-1]["position"]
    to_end = pytest.approx(nats_by_definition(model, model.tokenizer.eos), rel=TOLERANCE[weights])
    assert sum(each["nats"] for each in positions) == to_end

    written = written_by_steps(model, TEXT)
    assert generated("--prompt", TEXT) == written
    command("state build", file, "-o", state, *exact)
    assert generated("--load-state", state, "--prompt", "", learns=False) == written
    generated("--prompt", TEXT, "--save-state", state)
    continued = written_by_steps(model, TEXT, MORE)
    assert generated("--load-state", state, "--prompt", MORE, learns=False) == continued

    plain = replace(model, learn=False)
    with served(plain, store=SessionStore(plain, tmp_path / "sessions", Settings(memory=0))) as server:
        assert server.texts(prompt=TEXT, learn=learn, **GREEDY) == [written]
        assert server.post("/v1/score", text=TEXT, learn=learn).json()["bits"] * log(2) == to_end
        root = server.post("/v1/sessions", text=TEXT, learn=learn).json()["id"]
        fork = server.post(f"/v1/sessions/{root}/fork").json()["id"]
        assert server.texts(session=root, prompt="", **GREEDY) == [written]
        server.post("/v1/sessions", text=MORE)  # takes the only place in memory
        assert server.texts(session=fork, prompt="", **GREEDY) == [written]
    with served(plain, store=SessionStore(plain, tmp_path / "sessions")) as server:
        assert server.texts(session=root, prompt=MORE, **GREEDY) == [continued]


def written_by_steps(model: TrainedLanguageModel, *texts: str) -> str:
    """Return what the model writes after the last of several texts, each of which it reads and continues, by torch."""
    session, written = None, ""
    for text in texts:
        generation = model.generate(model.read(text, session), Sampling(temperature=0), [(0,)], TOKENS, drafts=False)
        written = "".join(piece for _, piece in generation)
        session = generation.finished()
    return written
