"""Quantized matrices: their grids, their layout in memory, and products with them by native code, to the last bit."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from machine import needs_native, on_other_processors
from torch import Tensor
from torch.testing import assert_close

from lmlong.attention.products import linear
from lmlong.model import quantization
from lmlong.model.quantization import GROUP, GroupedWeight, GroupFormat, quantized
from lmlong.model.weight_panels import pack, rounded_activations, unpack
from lmlong.native import build
from lmlong.native.grouped import kernel

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


SHAPES = [(40, 24, 3), (17, 100, 5), (64, 64, 9), (1, 33, 1), (16, 1, 2)]  # outputs, inputs, vectors


def drawn(outputs: int, inputs: int, vectors: int, group_format: GroupFormat) -> tuple[GroupedWeight, Tensor]:
    draw = torch.Generator().manual_seed(outputs)
    weight = quantized(torch.randn(outputs, inputs, generator=draw), group_format)
    return weight, torch.randn(vectors, inputs, generator=draw) * 3


def definition(weight: GroupedWeight, x: Tensor) -> Tensor:
    """The products by the formula of grouped.h; an extended double holds a fused product with a bit to spare."""
    inputs = x.shape[-1]
    groups = torch.nn.functional.pad(x, (0, -inputs % GROUP)).unflatten(-1, (-1, GROUP)).numpy()
    largest = np.abs(groups).max(-1, keepdims=True)
    codes = np.rint(groups * (np.float32(127) / largest)).astype(np.int64)
    scales = (largest / np.float32(127))[..., 0]
    fused = lambda a, b, c: (np.longdouble(a) * np.longdouble(b) + np.longdouble(c)).astype(np.float32)  # noqa: E731
    d = weight.scales.float().numpy()
    total = np.zeros((len(x), len(d)), np.float32)
    for g in range(groups.shape[1]):
        dots = codes[:, g] @ weight.codes[:, g].numpy().astype(np.int64).T
        if weight.minimums is None:
            products = d[:, g] * dots.astype(np.float32)
        else:
            offset = weight.minimums.float().numpy()[:, g] * codes[:, g].sum(-1, keepdims=True).astype(np.float32)
            products = fused(d[:, g], dots.astype(np.float32), offset)
        total = fused(scales[:, g, None], products, total)
    return torch.from_numpy(total)


@every_format
def test_unpack_returns_what_pack_was_given(group_format: GroupFormat) -> None:
    for outputs, inputs, _ in SHAPES:
        weight, _ = drawn(outputs, inputs, 1, group_format)
        again = unpack(pack(weight), outputs, inputs, group_format)
        for tensor, same in zip(again, weight, strict=True):
            assert tensor is same or torch.equal(torch.as_tensor(tensor), torch.as_tensor(same))


def multiplied(weight: GroupedWeight, x: Tensor) -> Tensor:
    return kernel.multiply(x, pack(weight), len(weight.codes), weight.minimums is not None)


@needs_native
@every_format
def test_native_products_are_the_definition_to_the_bit_and_those_of_torch(group_format: GroupFormat) -> None:
    usual = torch.get_num_threads()
    try:
        for shape in SHAPES:
            weight, x = drawn(*shape, group_format)
            for threads in (1, 3):
                torch.set_num_threads(threads)
                found = multiplied(weight, x)
                assert torch.equal(found, definition(weight, x))
            by_torch = linear(rounded_activations(x), weight.dequantized())
            assert_close(found, by_torch, rtol=1e-5, atol=1e-4)
    finally:
        torch.set_num_threads(usual)


@on_other_processors
def test_other_processors_compute_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: list[str]
) -> None:
    monkeypatch.setenv("LMLONG_CACHE", str(tmp_path))
    others = [flag.replace("-O3", "-O0") for flag in build.FLAGS if flag != "-march=native"]  # compiles sooner
    monkeypatch.setattr(build, "FLAGS", (*others, *flags))
    library = kernel.library.__wrapped__()
    monkeypatch.setattr(kernel, "library", lambda: library)
    for group_format, shape in product(FORMATS, SHAPES):
        weight, x = drawn(*shape, group_format)
        assert torch.equal(multiplied(weight, x), definition(weight, x))


@needs_native
@every_format
def test_the_largest_sums_fit(group_format: GroupFormat) -> None:
    code = 15 if group_format == "int4" else -127
    scales = torch.ones(16, 2).half()
    codes = torch.full((16, 2, GROUP), code, dtype=torch.uint8 if group_format == "int4" else torch.int8)
    weight = GroupedWeight(codes, scales, scales * 0 if group_format == "int4" else None, 2 * GROUP)
    x = torch.full((5, 2 * GROUP), 127.0)
    x[1] *= -1
    found = multiplied(weight, x)
    assert torch.equal(found, x @ weight.dequantized().mT)


def test_activations_are_off_by_half_a_step_at_most() -> None:
    x = torch.randn(3, 70) * torch.tensor([1e-4, 1.0, 1e4])[:, None]
    groups = torch.nn.functional.pad(x, (0, 26)).unflatten(-1, (-1, GROUP)).abs().amax(-1).repeat_interleave(GROUP, -1)
    off = (rounded_activations(x) - x).abs()
    assert (off <= groups[:, :70] / 127 / 2 * 1.001).all() and (off > 0).any()


@needs_native
@every_format
def test_values_that_are_not_finite_stay_not_finite(group_format: GroupFormat) -> None:
    weight, x = drawn(17, 40, 5, group_format)
    x[0, 35], x[1, 2], x[2], x[3] = torch.nan, -torch.inf, 0, 1e-40
    native = multiplied(weight, x)
    for found in (native, linear(rounded_activations(x), weight.dequantized())):
        assert found[:2].isnan().all() and not found[2:4].any() and found[4].isfinite().all()
