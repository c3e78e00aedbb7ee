"""The model card of a transformers export."""

from typing import Any

from lmlong.interop.card import card
from lmlong.interop.exporting import RunSource
from lmlong.model.state_size import StateSize, binary_size

USE = """## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{folder}"{remote})
model = AutoModelForCausalLM.from_pretrained("{folder}"{remote})
inputs = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=100)[0], skip_special_tokens=True))
```
"""
CONSTANT = """A document may have any length: memory and time per token are constant, with {size} of state for each row
of a batch. Rows of a batch are padded on the left. A state cannot go back by a token, so assisted generation is not
supported.
"""
GROWING = """Some of its layers keep the keys and values of all tokens, so its state grows with the text. Rows of a
batch are padded on the left.
"""
NEEDS = "`pip install lmlong` first: the module in this folder runs lmlong's own model."


def model_card(name: str, source: RunSource, state: StateSize | None, evaluation: dict[str, Any] | None) -> str:
    """Return the text. `state` is None if transformers' own Llama loads the model."""
    use = USE.format(folder=name, remote="" if state is None else ", trust_remote_code=True")
    if state is None:
        return card(name, source, "transformers", [], [use], evaluation)
    size = binary_size(state.empty.bytes)
    limits = "## Limits\n\n" + (GROWING if state.per_token.numbers else CONSTANT.format(size=size))
    return card(name, source, "transformers", ["linear-attention"], [use, limits], evaluation, NEEDS)
