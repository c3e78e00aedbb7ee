"""A run as it is exported for transformers, and what it computes there."""

import json
from pathlib import Path
from typing import Any

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


CASES: list[Case] = table("transformers", EXPORTED, transformers_model)
