"""The layout of quantized matrices in memory, and products with them by native code, to the last bit."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from machine import needs_native, on_other_processors
from torch import Tensor
from torch.testing import assert_close

from lmlong.model.layers import linear
from lmlong.model.quantization import GROUP, GroupedWeight, GroupFormat, quantized
from lmlong.model.weight_panels import pack, rounded_activations, unpack
from lmlong.native import build
from lmlong.native.grouped import kernel

FORMATS: tuple[GroupFormat, ...] = ("int4", "int8")
every_format = pytest.mark.parametrize("group_format", FORMATS)
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


@needs_native
@every_format
def test_native_products_are_the_definition_to_the_bit(group_format: GroupFormat) -> None:
    usual = torch.get_num_threads()
    try:
        for shape in SHAPES:
            weight, x = drawn(*shape, group_format)
            for threads in (1, 3):
                torch.set_num_threads(threads)
                found = kernel.multiply(x, pack(weight), shape[0], group_format == "int4")
                assert torch.equal(found, definition(weight, x))
    finally:
        torch.set_num_threads(usual)


@on_other_processors
def test_other_processors_compute_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: list[str]
) -> None:
    monkeypatch.setenv("LMLONG_CACHE", str(tmp_path))
    others = [flag for flag in build.FLAGS if flag != "-march=native"]
    monkeypatch.setattr(build, "FLAGS", (*others, *flags))
    library = kernel.library.__wrapped__()
    monkeypatch.setattr(kernel, "library", lambda: library)
    for group_format, shape in product(FORMATS, SHAPES):
        weight, x = drawn(*shape, group_format)
        assert torch.equal(kernel.multiply(x, pack(weight), shape[0], group_format == "int4"), definition(weight, x))


@needs_native
@every_format
def test_the_largest_sums_fit(group_format: GroupFormat) -> None:
    code = 15 if group_format == "int4" else -127
    scales = torch.ones(16, 2).half()
    codes = torch.full((16, 2, GROUP), code, dtype=torch.uint8 if group_format == "int4" else torch.int8)
    weight = GroupedWeight(codes, scales, scales * 0 if group_format == "int4" else None, 2 * GROUP)
    x = torch.full((5, 2 * GROUP), 127.0)
    x[1] *= -1
    found = kernel.multiply(x, pack(weight), 16, group_format == "int4")
    assert torch.equal(found, x @ weight.dequantized().mT)


@needs_native
@every_format
def test_torch_computes_the_same_up_to_rounding(group_format: GroupFormat) -> None:
    for shape in SHAPES:
        weight, x = drawn(*shape, group_format)
        found = kernel.multiply(x, pack(weight), shape[0], group_format == "int4")
        assert_close(found, linear(rounded_activations(x), weight.dequantized()), rtol=1e-5, atol=1e-4)


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
    native = kernel.multiply(x, pack(weight), 17, group_format == "int4")
    for found in (native, linear(rounded_activations(x), weight.dequantized())):
        assert found[:2].isnan().all() and not found[2:4].any() and found[4].isfinite().all()
