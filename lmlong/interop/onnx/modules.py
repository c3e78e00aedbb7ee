"""What the modules of a model declare of themselves, and their weights as those of a graph.

Like native code, a graph is a second implementation: it takes over what each module declares, and all of that. What it
does not know it refuses, so that nothing is left out in silence.
"""

from itertools import chain

import numpy as np
import torch
from torch import Tensor, nn

from lmlong.errors import UsageError
from lmlong.interop.onnx.graph import Graph, Value
from lmlong.native.spec import NativeSpec, NoNativeForm, spec_of

KNOWN = {
    "language_model": "embedding_scale downsampled_layers past_tokens embedding blocks hourglass norm lm_head",
    "lm_head": "matrix",
    "matrix": "weight",
    "rms_norm": "epsilon weight",
    "block": "mixer mlp",
    "swiglu": "norm in_proj out_proj",
    "mixer": "heads kv_heads head_dim value_dim uses_rope frequencies gated has_keys inputs gates "
    "norm in_proj convolution attention gates head_norm out_proj",
    "short_conv": "width weight",
    "gate": "activation shape down weight bias",
    "linear": "log_decay feature_map",
    "delta": "log_decay feature_map",
    "window": "window",
    "parallel_window": "recurrence window",
    "softmax_attention": "",
    "ngram": "sizes rows number_weight raw_smoothing",
    "unit": "features inner",
    "silu": "features",
    "elu": "features",
    "relu": "features",
    "softmax": "features",
    "cosine": "features",
    "hedgehog": "features query_projection key_projection",
    "taylor": "features inner query_projection key_projection",
    "favor": "features projection raw_gain constants",
}
"""What is known of each kind of module: the names of its options, weights and parts."""


class Modules:
    """The modules of a model, opened one by one while its graph is built."""

    def __init__(self, graph: Graph, model: nn.Module):
        self.graph = graph
        self._named = {id(weight): name for name, weight in chain(model.named_parameters(), model.named_buffers())}
        self._used: dict[int, Value | None] = {}

    def open(self, module: object) -> NativeSpec:
        """Return what a module declares, if all of it is known."""
        assert isinstance(module, nn.Module)
        try:
            spec = spec_of(module)
        except NoNativeForm as why:
            raise UsageError(f"model: {why}, so it has no form in ONNX. Use a kind of lmlong.") from None
        names = {*spec.options, *spec.weights, *spec.parts}
        if spec.kind not in KNOWN or names != set(KNOWN[spec.kind].split()):
            raise UsageError(f"{spec.kind}: {type(module).__name__} has no form in ONNX. Use `--to hf`.")
        return spec

    def weight(self, tensor: Tensor | None, transposed: bool = False) -> Value:
        """Return a weight in float32; a matrix may be transposed."""
        assert tensor is not None
        if self._used.get(id(tensor)) is None:
            found = array(tensor.mT if transposed else tensor)
            self._used[id(tensor)] = self.graph.weight(self._named[id(tensor)], found)
        value = self._used[id(tensor)]
        assert value is not None
        return value

    def know(self, tensor: Tensor | None) -> None:
        """Take note of a weight that the graph has in another form."""
        self._used.setdefault(id(tensor), None)

    def check_all_used(self) -> None:
        """Refuse a model with a weight that is not in its graph."""
        left = [name for key, name in self._named.items() if key not in self._used]
        if left:
            raise UsageError(f"{left[0]}: a weight without a form in ONNX. Use `--to hf`.")


def array(tensor: Tensor) -> np.ndarray:
    """Return a tensor in float32."""
    return tensor.detach().to(torch.float32).numpy()
