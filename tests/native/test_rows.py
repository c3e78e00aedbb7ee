"""Norms, gates and losses by native code, against their formulas in float64."""

import pytest
import torch
from machine import needs_native
from torch import Tensor
from torch.nn.functional import cross_entropy, rms_norm, silu

from lmlong.model.short_conv import ShortConvolution
from lmlong.native.rows import kernel

pytestmark = needs_native
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-8}
every_dtype = pytest.mark.parametrize("dtype", ROUNDING, ids=str)


def off(measured: Tensor | None, exact: Tensor | None) -> float:
    """Return the error relative to the norm."""
    assert measured is not None and exact is not None and measured.shape == exact.shape
    return float((measured.detach().double() - exact.detach()).norm() / exact.detach().norm())


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


@every_dtype
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("shape", [(3, 77, 320), (2, 65, 8, 40), (2, 3, 5, 7), (1, 1, 33)], ids=str)
def test_a_norm_and_its_gradients(shape: tuple[int, ...], gated: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, dy, gate = (torch.randn(shape).to(dtype) for _ in range(3))
    gain = torch.randn(shape[2:])
    native = [leaf(each) for each in ((x, gain, gate) if gated else (x, gain))]
    exact = [leaf(each.double()) for each in native]
    y = kernel.norm(native[0], native[1], 1e-5, dtype, *native[2:])
    true = rms_norm(exact[0], shape[-1:], eps=1e-5) * exact[1]
    true = true * silu(exact[2]) if gated else true
    assert y.dtype == dtype and off(y, true) < ROUNDING[dtype]
    y.backward(dy)
    true.backward(dy.double())
    for one, other in zip(native, exact, strict=True):
        assert off(one.grad, other.grad) < ROUNDING[dtype]


@every_dtype
def test_a_gated_mlp_and_its_gradient(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, dy = torch.randn(3, 50, 90).to(dtype), torch.randn(3, 50, 45).to(dtype)
    native, exact = leaf(x), leaf(x.double())
    y, (gate, value) = kernel.swiglu(native), exact.chunk(2, dim=-1)
    true = silu(gate) * value
    y.backward(dy)
    true.backward(dy.double())
    assert off(y, true) < ROUNDING[dtype] and off(native.grad, exact.grad) < ROUNDING[dtype]


@every_dtype
@pytest.mark.parametrize("documents", [False, True])
def test_a_convolution_and_its_gradients(documents: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    wide, dy, tail, weight = torch.randn(2, 90, 50), torch.randn(2, 90, 35), torch.randn(2, 3, 35), torch.randn(35, 4)
    positions = torch.arange(90).expand(2, 90) + 5
    if documents:
        positions = torch.stack([torch.arange(90) % 40, torch.cat([torch.arange(2) + 9, torch.arange(88) % 2])])
    x = wide.to(dtype)[..., 10:45]
    native, exact = (
        [leaf(each) for each in tensors]
        for tensors in ((x, tail.to(dtype), weight), (x.double(), tail.to(dtype).double(), weight.double()))
    )
    y = kernel.convolution(*native, positions if documents else None)
    true = ShortConvolution(35, 4)._masked_taps(torch.cat([exact[1], exact[0]], 1), exact[2], positions)
    y.backward(dy.to(dtype))
    true.backward(dy.to(dtype).double())
    assert off(y, true) < ROUNDING[dtype]
    for one, other in zip(native, exact, strict=True):
        assert off(one.grad, other.grad) < ROUNDING[dtype]


@every_dtype
def test_a_loss_and_its_gradient(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits, targets = (5 * torch.randn(130, 77)).to(dtype), torch.randint(77, (130,))
    targets[3] = kernel.IGNORED
    exact = leaf(logits.double())
    true = cross_entropy(exact, targets, ignore_index=kernel.IGNORED, reduction="none")
    true.sum().backward()
    assert off(kernel.loss(logits.clone(), targets, False), true) < 1e-6
    assert off(kernel.loss(logits, targets, True), true) < 1e-6
    assert off(logits, exact.grad) < ROUNDING[dtype] and not logits[3].any()


def test_no_number_depends_on_the_threads() -> None:
    torch.manual_seed(0)
    x, gain, gate, dy = torch.randn(500, 4, 20), torch.randn(4, 20), torch.randn(500, 4, 20), torch.randn(500, 4, 20)

    def results(threads: int) -> list[Tensor]:
        torch.set_num_threads(threads)
        leaves = [leaf(each) for each in (x, gain, gate)]
        y = kernel.norm(*leaves[:2], 1e-5, torch.float32, leaves[2])
        return [y, *torch.autograd.grad(y, leaves, dy)]

    before = torch.get_num_threads()
    try:
        one, three = results(1), results(3)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(*pair) for pair in zip(one, three, strict=True))


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_a_number_that_is_not_finite_makes_its_row_so_and_no_other(broken: float) -> None:
    x, logits = torch.ones(3, 40), torch.ones(3, 40)
    x[1, 5] = logits[1, 5] = broken
    results = [
        kernel.norm(x, torch.ones(40), 1e-5, torch.float32),
        kernel.swiglu(x),
        kernel.loss(logits, torch.tensor([1, 2, 3]), True)[:, None],
        logits,
    ]
    for result in results:
        assert [bool(row.isfinite().all()) for row in result] == [True, False, True]


def test_rows_of_a_wider_matrix_are_read_in_place() -> None:
    wide = torch.randn(2, 9, 100)
    part, gain = wide[..., 30:70], torch.randn(40)
    exact = rms_norm(part.double(), (40,), eps=1e-5) * gain
    assert off(kernel.norm(part, gain, 1e-5, torch.float32), exact) < 1e-6
    heads = wide.unflatten(2, (4, 25)).transpose(1, 2)  # (B, H, T, D): its rows have to be copied
    exact = rms_norm(heads.double(), (25,), eps=1e-5)
    assert off(kernel.norm(heads, torch.ones(25), 1e-5, torch.float32), exact) < 1e-6
