"""What a module declares is read as a whole, or the model is refused."""

import pytest
import torch
from torch import Tensor, nn

from lmlong.native.spec import ModelReader, NativeSpec, NoNativeForm


class Scaled(nn.Module):
    """y = power(scale x + base), with an offset."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.base = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(1))

    def native_spec(self) -> NativeSpec:
        weights: dict[str, Tensor | None] = {"scale": self.scale.mT, "offset": self.base + 1, "unused": None}
        return NativeSpec("scaled", {"power": 2}, weights, sources=(self.base,))


def read(module: nn.Module, *names: str) -> ModelReader:
    """Return a reader that has read some options and weights of a module."""
    reader = ModelReader(module)
    spec = reader.open(module, "scaled")
    for name in names:
        (spec.options if name in spec.options else spec.weights)[name]
    return reader


def test_a_module_that_is_read_as_a_whole_is_taken() -> None:
    read(Scaled(), "power", "scale", "offset", "unused").check_all_read()


def test_each_name_that_is_not_read_is_refused() -> None:
    names = ["power", "scale", "offset", "unused"]
    for left in names:
        with pytest.raises(NoNativeForm, match=f"declares {left}, which is not supported"):
            read(Scaled(), *(name for name in names if name != left)).check_all_read()


def test_a_name_that_is_not_declared_is_refused() -> None:
    with pytest.raises(NoNativeForm, match="declares no width"):
        read(Scaled(), "width")


def test_another_kind_is_refused() -> None:
    with pytest.raises(NoNativeForm, match="is of kind scaled; only softmax is supported here"):
        ModelReader(Scaled()).open(Scaled(), "softmax")


def test_a_weight_that_no_module_declares_is_refused() -> None:
    module = Scaled()
    module.bias = nn.Parameter(torch.ones(2))
    with pytest.raises(NoNativeForm, match="has bias, which is not supported"):
        read(module, "power", "scale", "offset", "unused").check_all_read()


def test_so_is_one_of_which_a_part_is_declared() -> None:
    module = Scaled()
    module.scale = nn.Parameter(torch.ones(6, 2)[:3])
    module.scale_of_all = nn.Parameter(module.scale.data.as_strided((6, 2), (2, 1)))
    with pytest.raises(NoNativeForm, match="has scale_of_all"):
        read(module, "power", "scale", "offset", "unused").check_all_read()
