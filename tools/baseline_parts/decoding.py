"""Prefill, decoding and saved states of every causal kind, by torch and by native code, in each format of weights."""

from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from typing import Any, Literal

import torch
from safetensors.torch import load_file

import lmlong
from baseline_parts.digests import Case
from baseline_parts.model_step import served, tensors
from baseline_parts.training import table
from baseline_parts.variants import KINDS
from baseline_parts.workspace import Options, Workspace, documents
from lmlong.cli.reading import Prompt
from lmlong.cli.writing import TextOutput
from lmlong.decode.engine import step
from lmlong.model.sampling_options import Sampling

PROMPT = " ".join(documents())[:300]
"""Longer than the windows and than two chunks."""

STEPS = 24

Weights = Literal["32", "bf16", "int8"]


def decoded(name: str, options: Options, weights: Weights, workspace: Workspace) -> dict[str, Any]:
    """Read a prompt, then continue it by torch and by native code: rows greedily, by draws, and as served."""
    trained = lmlong.load(workspace.run_of(name, options), "cpu", weights=weights)
    prompt = torch.tensor([list(PROMPT.encode()), list(PROMPT[::-1].encode())])
    with torch.inference_mode():
        hidden, state = trained.model(prompt)
        logits = trained.model.logits(hidden)
    values: dict[str, Any] = {"prefill": logits, "state": list(tensors(state))}
    for engine in ("torch", "native"):
        trained.use_fast_engine(engine == "native")
        alone = greedy(trained.model, logits[:, -1], state)
        text = trained.stream(PROMPT, max_tokens=STEPS, temperature=1.0, top_p=0.9, seed=3)
        served_rows = served(trained.model, state, alone["tokens"])
        values[engine] = {"greedy": alone, "sampled": "".join(text), "served": served_rows}
    return values


@torch.inference_mode()
def greedy(model: lmlong.LanguageModel, logits: torch.Tensor, state: Any) -> dict[str, Any]:
    """Return the likeliest tokens, the logits after each, and the state after the last."""
    tokens, after = [], []
    for _ in range(STEPS):
        tokens.append(logits.argmax(-1))
        logits, state = step(model, tokens[-1], state)
        after.append(logits)
    return {"tokens": torch.stack(tokens), "logits": torch.stack(after), "state": list(tensors(model.settle(state)))}


def saved(name: str, options: Options, workspace: Workspace) -> dict[str, Any]:
    """Save the state after a prompt, with float32 and float64 sums, and continue from the file."""
    run, values = workspace.run_of(name, options), {}
    for dtype in ("32", "64"):
        trained = lmlong.load(run, "cpu", state_dtype=dtype)  # type: ignore[arg-type]
        trained.use_fast_engine(False)
        file = workspace.folder / f"{name} {dtype}.state"
        trained.save_state(trained.read(PROMPT), file)
        text = "".join(trained.stream("the", state=trained.load_state(file), max_tokens=STEPS, temperature=0.0))
        values[dtype] = {"file": load_file(file), "text": text}
    return values


def generated(name: str, options: Options, workspace: Workspace) -> dict[str, Any]:
    """Return what `lmlong generate --json` writes: tokens and their log-probabilities, with options of sampling."""
    trained = lmlong.load(workspace.run_of(name, options), "cpu")
    trained.use_fast_engine(None)
    sampling = Sampling(seed=7, top_k=20, repetition_penalty=1.2)
    with redirect_stdout(StringIO()) as printed:
        output = TextOutput(trained, sampling, samples=2, max_tokens=30, as_json=True)
        output.write([Prompt(PROMPT, {})], [trained.read(PROMPT)])
    return {"json": printed.getvalue()}


CASES = [
    *(
        Case(f"decode {name} {weights}", partial(decoded, name, options, weights))
        for name, options in KINDS.items()
        for weights in ("32", "bf16", "int8")
    ),
    *table("state", KINDS, saved),
    *table("generate", {"ngram": KINDS["ngram"]}, generated),
]
