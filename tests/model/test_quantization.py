"""The grids of quantized matrices."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from lmlong.model import quantization
from lmlong.model.quantization import GROUP, GroupedWeight, GroupFormat, quantized

FORMATS: tuple[GroupFormat, ...] = ("int4", "int8")
every_format = pytest.mark.parametrize("group_format", FORMATS)


@pytest.mark.parametrize("largest", [1e3, 1e-3, 1e-5, 1e-7])
def test_each_int8_weight_is_off_by_half_a_step_at_most(largest: float) -> None:
    """Scales of weights below 2^-14 * 127 have fewer bits in float16."""
    torch.manual_seed(0)
    weight = largest * torch.rand(100, 3 * GROUP).mul(2).sub(1)
    codes = quantized(weight, "int8")
    off, scales = (codes.dequantized() - weight).abs().view_as(codes.codes), codes.scales.float()[..., None]
    assert (off <= scales * 0.57).all()  # float16 keeps 11 bits of a scale, which is multiplied by up to 127
    assert (off > scales * 0.05).any()
    nearest = weight.view_as(codes.codes).abs().amax(-1, keepdim=True) / 127
    assert (scales <= nearest * 1.005 + 2**-24).all()


def errors(weight: Tensor, found: Tensor) -> Tensor:
    """The squared error of each group."""
    return (weight - found).square().view(len(weight), -1, GROUP).sum(-1)


def between_extremes(weight: Tensor) -> Tensor:
    """The nearest of 16 even numbers from the smallest to the largest weight of each group, both in float16."""
    groups = weight.view(len(weight), -1, GROUP).double()
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale, low = ((high - low) / 15).half().double(), low.half().double()
    return (((groups - low) / scale).round().clamp(0, 15) * scale + low).flatten(1)


@pytest.mark.parametrize("heavy", [False, True])
def test_int4_groups_are_fitted_better_than_from_their_smallest_to_their_largest(heavy: bool) -> None:
    torch.manual_seed(0)
    weight = torch.randn(300, 3 * GROUP) ** (3 if heavy else 1) * torch.logspace(-3, 2, 300)[:, None]
    found, plain = errors(weight, quantized(weight, "int4").dequantized()), errors(weight, between_extremes(weight))
    assert (found <= plain * (1 + 1e-4)).all()
    assert (found / plain).mean() < 0.87


def test_groups_have_the_same_codes_however_many_are_fitted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    weight = torch.randn(20, 3 * GROUP)
    whole = quantized(weight, "int4")
    monkeypatch.setattr(quantization, "GROUPS_AT_ONCE", 7)
    assert all(map(torch.equal, whole[:3], quantized(weight, "int4")[:3]))


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
