"""The model card of an ONNX export."""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from lmlong.interop.card import card
from lmlong.interop.exporting import RunSource
from lmlong.model.sampling_options import DEFAULTS
from lmlong.model.state_size import binary_size
from lmlong.native.onnx.graph import State

USE = """## Use

```python
import json
from pathlib import Path

import numpy as np
import onnxruntime
from tokenizers import Tokenizer

folder = Path("{folder}")
config = json.loads((folder / "config.json").read_text())
tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
session = onnxruntime.InferenceSession(folder / "model.onnx")


def read(ids, state):
{read}

def loops(ids):  # the tokens that would begin a third copy of what the text ends with twice in a row
    units = ((size, max(size, 2)) for size in range(1, len(ids) // 2 + 1))
    return [ids[-size] for size, last in units if ids[-last:] == ids[-last - size : -size]]


state = {{part["input"]: np.zeros([1, *part["shape"]], part["dtype"]) for part in config["state"]}}
ids = tokenizer.encode("Once upon a time").ids
for begin in range(0, len(ids), 256):
    logits, state = read(ids[begin : begin + 256], state)
draw, written = np.random.default_rng(0), []
for _ in range(100):
    logits[loops(written)] = -np.inf
    chances = np.exp((logits - logits.max()).astype("float64") / {temperature})
    token = int(draw.choice(len(chances), p=chances / chances.sum()))
    if token == config["eos_token_id"]:
        break
    written.append(token)
    logits, state = read([token], state)
print(tokenizer.decode(ids + written))
```
"""
READ = """    logits, *after = session.run(None, {"ids": np.array([ids]), **state})
    return logits[0, -1], dict(zip(state, after))
"""
READ_IN_PLACE = """    binding = session.io_binding()
    binding.bind_cpu_input("ids", np.array([ids]))
    binding.bind_output("logits")
    for part in config["state"]:
        past = onnxruntime.OrtValue.ortvalue_from_numpy(state[part["input"]])
        binding.bind_ortvalue_input(part["input"], past)
        if part["in_place"]:
            binding.bind_ortvalue_output(part["output"], past)
        else:
            binding.bind_output(part["output"])
    session.run_with_iobinding(binding)
    logits, *after = (value.numpy() for value in binding.get_outputs())
    kept = {part["input"]: state[part["input"]] for part in config["state"] if part["in_place"]}
    return logits[0, -1], dict(zip(state, after)) | kept
"""
CALLS = """## Calls

`pip install "onnxruntime>=1.26" tokenizers numpy`; on a CPU, since onnxruntime has two of the operators only for CPUs.
The input `ids` (B, T) has any number of rows and tokens. `logits` (B, T, V) predict the token after each. Read a text
in chunks of some hundred tokens, and generate token by token. `config.json` lists the tensors of the state, without
their first dimension, the rows. Each is an input and, under another name, an output; the outputs follow `logits` in
this order. A document begins with a state of zeros and with the token that the tokenizer puts first. Rows of a batch
may be at different positions. Weights and the sums of the state are float32.
"""
CONSTANT = "The state takes {size} for each row, however long the text is.\n"
GROWING = "Tensors with a dimension of 0 grow with the text, by {size} for each token of a row.\n"
IN_PLACE = """The tables of n-gram heads are updated in place: copy a state before continuing it with several texts.
"""


def model_card(name: str, source: RunSource, states: Sequence[State], evaluation: dict[str, Any] | None) -> str:
    """Return the text."""
    growing = [state for state in states if 0 in state.shape]
    in_place = any(state.in_place for state in states)
    use = USE.format(folder=name, read=READ_IN_PLACE if in_place else READ, temperature=DEFAULTS.temperature)
    size = (GROWING if growing else CONSTANT).format(size=_size(growing or states))
    sections = [use, CALLS + size + (IN_PLACE if in_place else "")]
    return card(name, source, "onnx", ["onnx"], sections, evaluation)


def _size(states: Sequence[State]) -> str:
    """Return the size of a state, or of the part that each token adds."""
    numbers = sum(np.dtype(state.dtype).itemsize * prod(size or 1 for size in state.shape) for state in states)
    return binary_size(numbers)
