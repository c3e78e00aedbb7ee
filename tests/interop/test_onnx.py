"""Models exported to ONNX have the same logits and texts in onnxruntime, without lmlong and torch."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from interop.exported import FORMS, text, write_run
from looping import write_looping_run
from loops import find_loop

from lmlong.attention.feature_maps import Elu
from lmlong.attention.registry import CAUSAL
from lmlong.cli.main import lmlong as command
from lmlong.data.tokenizers.base import ByteTokenizer
from lmlong.errors import UsageError
from lmlong.interop.onnx.export import export_onnx
from lmlong.model.language_model import LanguageModel
from lmlong.model.loop_guard import LoopGuard
from lmlong.model.sampling_options import DEFAULTS
from lmlong.native.spec import NativeSpec

State = dict[str, np.ndarray]
FORMS_HERE = {
    **FORMS,
    "convolution without a past": {"attention": {"kind": "window", "window": 1}, "convolution": 1},
    "values of another size": {
        "attention": {"kind": ["softmax", "window"], "window": 5},
        "value_dim": 12,
        "kv_heads": 2,
    },
    "added heads": {
        "attention": {"kind": ["softmax", "linear"], "ngram": {"sizes": [1, 2], "buckets": 11}},
        "add_ngram": [1, 2],
        "kv_heads": 2,
    },
    "n-grams alone": {"attention": {"kind": "ngram", "ngram": {"sizes": [3, 1], "buckets": 5}}, "kv_heads": 2},
    **{f"{kind} alone": {"attention": {"kind": kind}} for kind in CAUSAL if kind != "ngram"},
}


class Onnx:
    """An exported folder in onnxruntime."""

    def __init__(self, folder: Path):
        onnxruntime = pytest.importorskip("onnxruntime")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(folder / "model.onnx", options)
        self.parts = json.loads((folder / "config.json").read_text())["state"]

    def begin(self, rows: int) -> State:
        return {part["input"]: np.zeros([rows, *part["shape"]], part["dtype"]) for part in self.parts}

    def read(self, ids: Any, state: State) -> tuple[np.ndarray, State]:
        logits, *after = self.session.run(None, {"ids": np.asarray(ids), **state})
        return logits, dict(zip(state, after, strict=True))

    def in_pieces(self, ids: Any, sizes: list[int]) -> np.ndarray:
        state, found = self.begin(len(ids)), []
        for piece in np.split(np.asarray(ids), np.cumsum(sizes), axis=1):
            logits, state = self.read(piece, state)
            found.append(logits)
        return np.concatenate(found, axis=1)

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        logits, state = self.read([prompt], self.begin(1))
        written: list[int] = []
        for _ in range(count):
            written.append(int(logits[0, -1].argmax()))
            logits, state = self.read([written[-1:]], state)
        return written


def apart(found: np.ndarray, expected: torch.Tensor) -> float:
    """The largest difference, relative to the largest logit."""
    assert found.shape == expected.shape and found.dtype == np.float32
    return float((torch.from_numpy(found) - expected).abs().max() / expected.abs().max())


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    for _ in range(count):
        ids = torch.cat([ids, model(ids)[0][:, -1].argmax(-1, keepdim=True)], dim=1)
    return ids[0, -count:].tolist()


def sampled(model: Any, prompt: list[int], count: int) -> list[int]:
    """What the program of the card draws: at the default temperature, without a third copy in a row."""
    random, written, guard = np.random.default_rng(0), [], LoopGuard(DEFAULTS)
    for _ in range(count):
        logits = model(torch.tensor([prompt + written]))[0][0, -1].double().numpy()
        logits[list(guard.penalties())] = -np.inf
        chances = np.exp((logits - logits.max()) / DEFAULTS.temperature)
        written.append(int(random.choice(len(chances), p=chances / chances.sum())))
        guard.append(written[-1])
        if written[-1] == 257:
            break
    return written


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[LanguageModel, Onnx]]:
    """Return the model of a form and its export, made at its first use."""
    folder = tmp_path_factory.mktemp("exports")

    @cache
    def exported(form: str) -> LanguageModel:
        model = write_run(folder / form / "run", **FORMS_HERE[form])
        assert export_onnx(str(folder / form / "run"), folder / form / "onnx").architecture == "ONNX"
        return model

    @cache
    def of_form(form: str) -> tuple[LanguageModel, Onnx]:
        return exported(form), Onnx(folder / form / "onnx")  # without onnxruntime it is exported, and the rest skipped

    return of_form


@pytest.mark.interop
@pytest.mark.parametrize("form", FORMS_HERE)
@torch.no_grad()
def test_onnxruntime_has_the_same_logits_and_writes_the_same(
    export: Callable[[str], tuple[LanguageModel, Onnx]], form: str
) -> None:
    original, exported = export(form)
    ids = text(3, 150)
    expected, _ = original(ids)
    assert apart(exported.read(ids, exported.begin(3))[0], expected) < 1e-5
    assert apart(exported.in_pieces(ids, [70, *[1] * 10, 9]), expected) < 1e-5
    for row, size in zip(ids.tolist(), (150, 31, 1), strict=True):
        assert exported.greedy(row[:size], 12) == greedy(original, row[:size], 12)


@pytest.mark.interop
@pytest.mark.parametrize("form", FORMS_HERE)
@torch.no_grad()
def test_rows_of_a_batch_may_be_at_different_places(
    export: Callable[[str], tuple[LanguageModel, Onnx]], form: str
) -> None:
    (original, exported), ids = export(form), text(2, 60)
    read = [exported.read(row[None, :size], exported.begin(1))[1] for row, size in zip(ids, (50, 20), strict=True)]
    longest = {name: max(state[name].shape[2:3] for state in read) for name in read[0]}
    for state in read:  # those that grow are padded on the left
        for name, size in longest.items():
            if missing := size and size[0] - state[name].shape[2]:
                state[name] = np.pad(state[name], [(0, 0), (0, 0), (missing, 0), (0, 0)])
    together = {name: np.concatenate([state[name] for state in read]) for name in read[0]}
    found, _ = exported.read(torch.stack([ids[0, 50:60], ids[1, 20:30]]), together)
    assert apart(found[:1], original(ids[:1])[0][:, 50:]) < 1e-5
    assert apart(found[1:], original(ids[1:, :30])[0][:, 20:]) < 1e-5


def example_of(folder: Path, end: str) -> str:
    """What the program of the card prints, with a last line that is run after it."""
    card = (folder / "README.md").read_text()
    (example,) = re.findall(r"^```python\n(.*?)^```", card, flags=re.DOTALL | re.MULTILINE)
    without = "import sys\nsys.modules['lmlong'] = sys.modules['torch'] = sys.modules['onnx'] = None\n"
    words = [sys.executable, "-c", f"{without}{example}{end}\n"]
    done = subprocess.run(words, capture_output=True, cwd=folder.parent, timeout=120)  # as a stranger runs it
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


@pytest.mark.interop
def test_the_example_of_its_card_writes_no_loop(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    write_looping_run(tmp_path / "run")
    export_onnx(str(tmp_path / "run"), tmp_path / "onnx")
    text = example_of(tmp_path / "onnx", "")
    assert len(text) > 100 and not find_loop(text)


@pytest.mark.interop
@pytest.mark.parametrize("form", ["ngram", "softmax"])
@torch.no_grad()
def test_the_example_of_its_card_runs_where_neither_lmlong_nor_torch_is_installed(tmp_path: Path, form: str) -> None:
    pytest.importorskip("onnxruntime")
    original = write_run(tmp_path / "run", **FORMS[form])
    export_onnx(str(tmp_path / "run"), tmp_path / "onnx")
    printed = example_of(tmp_path / "onnx", "print(ids + written)")
    prompt = [256, *b"Once upon a time"]
    expected = sampled(original, prompt, 100)
    assert 257 in expected or len(expected) == 100
    expected = [token for token in expected if token != 257]
    written, ids, _ = printed.rsplit("\n", 2)
    assert json.loads(ids) == [*prompt, *expected]
    assert written == ByteTokenizer().decode(json.loads(ids)).encode("utf-8", "replace").decode()


@pytest.mark.interop
def test_its_graph_is_valid_and_says_what_it_is_given(tmp_path: Path) -> None:
    import onnx

    write_run(tmp_path / "run", **FORMS["softmax"])
    export_onnx(str(tmp_path / "run"), tmp_path / "onnx")
    onnx.checker.check_model(tmp_path / "onnx" / "model.onnx")
    graph = onnx.load(tmp_path / "onnx" / "model.onnx", load_external_data=False).graph
    shapes = {
        value.name: [axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.output)
    }
    assert shapes["ids"] == ["batch", "time"] and shapes["logits"] == ["batch", "time", 258]
    assert shapes["past.0.keys"] == ["batch", 4, "past", 8] and shapes["past.1.S"] == ["batch", 4, 8, 8]
    assert shapes["present.0.keys"] == ["batch", 4, "past + time", 8]
    files = {path.name for path in (tmp_path / "onnx").iterdir()}
    tokenizer_files = {"tokenizer.json", "tokenizer_config.json"}
    assert files == {"README.md", "config.json", "model.onnx", "model.onnx.data", *tokenizer_files}


def test_the_command_tells_what_it_wrote_and_the_card_how_the_model_reads(tmp_path: Path) -> None:
    write_run(tmp_path / "run", **FORMS["ngram"])
    told = {"runs": [{"context": [{"length": 16, "bits_per_byte": 2.345}]}]}
    (tmp_path / "told.json").write_text(json.dumps(told))
    words = ["export", str(tmp_path / "run"), "--to", "onnx", "--out", str(tmp_path / "onnx")]
    done = CliRunner().invoke(command, [*words, "--evaluation", str(tmp_path / "told.json")])
    assert done.exit_code == 0, done.output
    assert re.search(r"onnx: ONNX, [\d,]+ parameters\n$", done.output)
    card = (tmp_path / "onnx" / "README.md").read_text()
    assert "| 16 | 2.345 |" in card and "linear + ngram" in card and "12,345 tokens" in card and "in place" in card
    kept = [part for part in json.loads((tmp_path / "onnx" / "config.json").read_text())["state"] if part["in_place"]]
    assert [part["input"] for part in kept] == ["past.1.S", "past.1.number", "past.1.ngram"]


def test_a_package_that_is_missing_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "run", **FORMS["elu"])
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(UsageError, match=r"onnx is not installed\. Run pip install -e '\.\[onnx\]'"):
        export_onnx(str(tmp_path / "run"), tmp_path / "onnx")
    assert not list(tmp_path.glob("*onnx*"))


class Doubled(torch.nn.Linear):
    """A layer that is not what it inherits."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Steeper(Elu):
    """A feature map with a native form of its own, and a graph that it inherits."""

    def query(self, q: torch.Tensor) -> torch.Tensor:
        return super().query(2 * q)

    def native_spec(self) -> NativeSpec:
        return NativeSpec("steeper")


def test_a_graph_that_a_class_inherits_is_not_taken_for_its_own(tmp_path: Path) -> None:
    from lmlong.interop.onnx.model import onnx_model

    model = write_run(tmp_path / "run", **FORMS["elu"])
    model.blocks[0].mixer.attention.feature_map = Steeper(8)
    with pytest.raises(UsageError, match="Steeper has no method onnx"):
        onnx_model(model)


def test_a_module_that_is_not_known_is_refused(tmp_path: Path) -> None:
    from lmlong.interop.onnx.model import onnx_model

    model = write_run(tmp_path / "run", **FORMS["elu"])
    model.blocks[0].mixer.out_proj = Doubled(32, 32, bias=False)
    with pytest.raises(UsageError, match="Doubled declares no native form"):
        onnx_model(model)
    model = write_run(tmp_path / "other", **FORMS["elu"])
    model.blocks[1].mlp.register_parameter("scale", torch.nn.Parameter(torch.ones(1)))
    with pytest.raises(UsageError, match=r"blocks\.1\.mlp\.scale"):
        onnx_model(model)
