"""A run as it is exported for onnxruntime and for transformers, and what it computes there."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from baseline_parts.decoding import PROMPT
from baseline_parts.digests import Case
from baseline_parts.training import table
from baseline_parts.variants import KINDS
from baseline_parts.workspace import Options, Workspace, silence

EXPORTED = {name: KINDS[name] for name in ("linear hedgehog learned", "ngram")}


def exported(name: str, to: str, options: Options, workspace: Workspace) -> Path:
    """Return the folder that `lmlong export` writes."""
    run, folder = str(workspace.run_of(name, options)), workspace.folder / f"{to} {name}"
    workspace.command("export", run, "--to", to, "--out", str(folder))
    return folder


def onnx_graph(name: str, options: Options, workspace: Workspace) -> dict[str, Any]:
    """Return the operators and constants of the graph, and its outputs for a prompt from an empty state."""
    import onnx
    import onnxruntime

    folder = exported(name, "onnx", options, workspace)
    graph = onnx.load(folder / "model.onnx").graph
    about = json.loads((folder / "config.json").read_text())
    chosen = onnxruntime.SessionOptions()
    chosen.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(folder / "model.onnx", chosen)
    state = {part["input"]: np.zeros([1, *part["shape"]], part["dtype"]) for part in about["state"]}
    outputs = session.run(None, {"ids": np.array([list(PROMPT.encode())]), **state})
    return {
        "operators": [node.op_type for node in graph.node],
        "constants": {constant.name: onnx.numpy_helper.to_array(constant) for constant in graph.initializer},
        "config": about,
        "outputs": dict(zip([output.name for output in session.get_outputs()], outputs, strict=True)),
    }


def transformers_model(name: str, options: Options, workspace: Workspace) -> dict[str, Any]:
    """Return the weights and the config, and the logits of a prompt by transformers."""
    from transformers import AutoModelForCausalLM

    folder = exported(name, "hf", options, workspace)
    with silence():
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    with torch.inference_mode():
        logits = model(torch.tensor([list(PROMPT.encode())])).logits
    config = json.loads((folder / "config.json").read_text())
    return {"weights": load_file(folder / "model.safetensors"), "config": config, "logits": logits}


CASES: list[Case] = [*table("onnx", EXPORTED, onnx_graph), *table("transformers", EXPORTED, transformers_model)]
