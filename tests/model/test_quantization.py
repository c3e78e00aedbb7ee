"""The grids of quantized matrices."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from lmlong.model.quantization import GROUP, GroupedWeight, GroupFormat, quantized

FORMATS: tuple[GroupFormat, ...] = ("int4", "int8")
every_format = pytest.mark.parametrize("group_format", FORMATS)


def steps(weight: Tensor, group_format: GroupFormat) -> Tensor:
    """The distance between neighbours of the grid, of each group."""
    groups = weight.view(len(weight), -1, GROUP)
    if group_format == "int8":
        return groups.abs().amax(-1, keepdim=True) / 127
    return (groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)) / 15


@every_format
def test_each_weight_is_off_by_half_a_step_at_most(group_format: GroupFormat) -> None:
    torch.manual_seed(0)
    weight = torch.randn(7, 3 * GROUP) * torch.logspace(-3, 3, 7)[:, None]
    off = (quantized(weight, group_format).dequantized() - weight).abs().view(7, 3, GROUP)
    # float16 keeps 11 bits of a scale, which is multiplied by up to 127, and of a minimum
    largest = weight.view(7, 3, GROUP).abs().amax(-1, keepdim=True)
    assert (off <= steps(weight, group_format) / 2 + 2**-10 * largest).all()
    assert (off > steps(weight, group_format) / 10).any()


@every_format
def test_a_matrix_on_the_grid_stays_the_same(group_format: GroupFormat) -> None:
    torch.manual_seed(0)
    once = quantized(torch.randn(40, 5 * GROUP), group_format)
    again = quantized(once.dequantized(), group_format)
    for tensor, same in zip(again, once, strict=True):
        assert tensor is same or torch.equal(torch.as_tensor(tensor), torch.as_tensor(same))


@every_format
def test_matrices_of_other_widths(group_format: GroupFormat) -> None:
    torch.manual_seed(0)
    for inputs in (1, 31, 33, 50):
        weight = torch.randn(3, inputs)
        found = quantized(weight, group_format).dequantized(torch.float64)
        assert found.shape == weight.shape
        assert_close(found, weight.double(), atol=0.3 if group_format == "int4" else 0.02, rtol=0)


@every_format
def test_groups_of_one_number_are_exact(group_format: GroupFormat) -> None:
    for number in (0.0, 0.5, -2.0):
        weight = torch.full((2, GROUP), number)
        exact = quantized(weight, group_format).dequantized()
        assert_close(exact, weight, rtol=1e-3 if group_format == "int8" else 0, atol=0)


def test_codes_stay_in_range_when_a_scale_is_rounded_down() -> None:
    weight = torch.linspace(-1, 1.0004, GROUP).repeat(50, 1) * torch.linspace(0.5, 1, 50)[:, None]
    assert quantized(weight, "int4").codes.max() == 15
    assert quantized(weight, "int8").codes.abs().max() == 127


def test_the_definition_of_a_code() -> None:
    scales, minimums = torch.tensor([[0.5]]).half(), torch.tensor([[-2.0]]).half()
    codes = torch.arange(GROUP).view(1, 1, GROUP)
    given = GroupedWeight(codes, scales, minimums, 3)
    assert given.dequantized().tolist() == [[-2.0, -1.5, -1.0]]
    assert given._replace(minimums=None).dequantized().tolist() == [[0.0, 0.5, 1.0]]
