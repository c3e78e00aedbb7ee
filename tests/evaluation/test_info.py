"""`lmlong info` as its user meets it."""

import json
import platform
import re
from pathlib import Path

import pytest
import torch
from commands import lmlong
from machine import needs_native

from lmlong.attention.delta import native as delta
from lmlong.decode import native
from lmlong.inference.loading import load
from lmlong.native.build import find_compiler

DECODED_BY = (
    "native code, compiled on this machine"
    if find_compiler()
    else "torch (needs a C++ compiler. Install g++, or name one in the environment variable CXX)"
)

METRICS = """\
{"step": 5, "validation": {"nats": 1.0, "tokens": 2, "bytes": 3, "nats_per_token": 0.5, "bits_per_byte": 0.48}}
{"step": 7, "loss": 5.5, "bits_per_byte": 7.9}
{"step": 7, "validation": {"nats": 8.0, "tokens": 2, "bytes": 4, "nats_per_token": 4.0, "bits_per_byte": 2.885}}
{"step": 9, "validation": {"nats": 1.0, "tokens": 2, "bytes": 3, "nats_per_token": 0.5, "bits_per_byte": 0.48}}
{"step": 9, "lo"""


def told(*words: object) -> str:
    done = lmlong("info", *words)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_a_run_is_described(run: Path) -> None:
    (run / "metrics.jsonl").write_text(METRICS)
    facts = json.loads(told(run, "--json"))
    here, unusable = facts.pop("kernels here"), facts.pop("kernels not usable here", {})
    assert here == {"linear": "native" if find_compiler() else "torch"}
    assert bool(unusable) is (here["linear"] == "torch"), "only what would be faster"
    assert facts == {
        "name": "run",
        "objective": "causal",
        "checkpoint": str(run.resolve() / "checkpoints" / "step-00000007"),
        "step": 7,
        "trained tokens": 7 * 2 * 3 * 64,
        "trained length": 64,
        "parameters": sum(weight.numel() for weight in load(run, "cpu").model.parameters()),
        "weights stored in": "float32",
        "vocabulary": 258,
        "attention by layer": ["linear", "linear"],
        "tokens read as one by layer": [1, 1],
        "decoded by": DECODED_BY,
        "learns by default": False,
        "state bytes": 2312,
        "state bytes per token": 0,
        # D, bias, squares, scale and slopes; a block of hidden states and tokens; the mark of the next token
        "state bytes with --learn": 2312 + 4 * (258 * 16 + 2 * 258 + 2 + 1) + 16 * (4 * 16 + 8) + 1,
        "validation": {"step": 7, **json.loads(METRICS.splitlines()[2])["validation"]},
    }


def test_a_run_in_words(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parents[1])
    lines = told("tiny").splitlines()
    assert "checkpoint                runs/tiny/checkpoints/step-00000007" in lines
    assert "state bytes               2.3 KiB, saved by default" in lines
    assert any(re.fullmatch(r"state bytes with --learn  [\d.]+ KiB", line) for line in lines)
    assert "validation                none" in lines
    (run / "metrics.jsonl").write_text(METRICS)
    assert max(map(len, told("tiny").splitlines())) <= 80
    words = "step 7, tokens 2, bytes 4, nats per token 4.0000, bits per byte 2.8850"
    assert " ".join(told("tiny").split()).endswith(words)


def test_the_installation_is_described() -> None:
    facts = json.loads(told("--json"))
    assert facts["python"] == platform.python_version()
    assert facts["torch"] == torch.__version__
    assert facts["native code"] == ("compiled on this machine" if find_compiler() else None)
    assert facts["threads"] == torch.get_num_threads()
    assert (facts["device"] == "cpu") is not torch.cuda.is_available()
    assert list(facts) == [line.split("  ")[0] for line in told().splitlines()]


@needs_native
def test_native_code_that_cannot_be_loaded_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (delta, native):
        monkeypatch.setattr(module, "library", lambda: None)
    assert json.loads(told("--json"))["native code"].endswith("; not loaded: delta rule, decode step")
