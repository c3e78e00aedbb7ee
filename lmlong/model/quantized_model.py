"""Models whose weight matrices are stored in fewer bits, or rounded as if they were."""

from torch import nn

from lmlong.model.base import QuantizedLMHead, TextModel
from lmlong.model.layers import Linear, quantized_linear
from lmlong.model.quantization import GroupFormat, WeightFormat, Weights, output_format


class QuantizableModel(TextModel):
    """A model with weight matrices in any format."""

    weight_format: Weights = "32"

    def round_weights(self, rounding: GroupFormat | None) -> None:
        """Compute with the values that the matrices have once `quantize` has stored them in a format, or with the
        weights as they are. Gradients pass to the weights unchanged."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.rounding = rounding
        self.lm_head.rounding = rounding and output_format(rounding)

    def quantize(self, weight_format: WeightFormat) -> None:
        """Quantize all weight matrices, so that each token reads less memory. With `int8` and `int4`, products round
        their inputs to int8; with `int4`, the output matrix is in int8."""
        self.weight_format = weight_format
        for module in list(self.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(module, name, quantized_linear(child.weight, weight_format))
        self.lm_head = QuantizedLMHead(self.lm_head, output_format(weight_format))
