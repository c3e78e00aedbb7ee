"""Weight matrices that are stored in fewer bits, or rounded as if they were."""

from torch import nn

from lmlong.model.base import QuantizedLMHead, TextModel
from lmlong.model.layers import Linear, quantized_linear
from lmlong.model.quantization import GroupFormat, WeightFormat, output_format


def round_weights(model: TextModel, rounding: GroupFormat | None) -> None:
    """Let a model compute with the values that its matrices have once `quantize` has stored them in a format, or with
    the weights as they are. Gradients pass to the weights unchanged."""
    for module in model.modules():
        if isinstance(module, Linear):
            module.rounding = rounding
    model.lm_head.rounding = rounding and output_format(rounding)


def quantize(model: TextModel, weight_format: WeightFormat) -> None:
    """Quantize all weight matrices of a model, so that each token reads less memory. With `int8` and `int4`, products
    round their inputs to int8; with `int4`, the output matrix is in int8."""
    model.weight_format = weight_format
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, quantized_linear(child.weight, weight_format))
    model.lm_head = QuantizedLMHead(model.lm_head, output_format(weight_format))
