"""Softmax attention and windows as a GPU computes them: by lists of blocks, which a stand-in reads on a CPU."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from grids import thinned
from machine import needs_compiler
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._pytree import tree_leaves

from lmlong.attention import block_sparse, device_policy, laws
from lmlong.attention.base import CausalAttention
from lmlong.attention.block_sparse import by_flex_attention
from lmlong.attention.device_policy import CPU_POLICY, GPU_POLICY, DevicePolicy, use_policy
from lmlong.attention.key_blocks import BLOCK, BlockList, VisibleKeys, block_lists, visible_keys
from lmlong.attention.softmax import layer
from lmlong.attention.softmax.layer import SoftmaxAttention
from lmlong.attention.softmax.state import KeyValues, KVCache
from lmlong.attention.window.layer import WindowAttention, WindowState
from lmlong.model.allocations import Allocations
from lmlong.testing import random_text

HEADS, HEAD_DIM, VALUE_DIM = 4, 16, 24


def past(attention: CausalAttention, tokens: int) -> Any:
    """Return the state of two rows after `tokens` tokens, some of which no token attends to any more: single tokens of
    the first row, and whole blocks of the second."""
    _, k, v, *_ = random_text(attention, tokens, torch.float64, seed=1, starts=False)
    current = torch.ones(2, tokens, dtype=torch.bool)
    current[0, ::5] = False
    current[1, : 2 * BLOCK] = False
    if isinstance(attention, WindowAttention):
        return WindowState(k, v, current)
    settled = tokens // BLOCK * BLOCK
    parts = (slice(0, settled), slice(settled, tokens))
    return KVCache(*(KeyValues(k[:, :, part], v[:, :, part], current[:, part]) for part in parts))


def computed(attention: CausalAttention, text: laws.Text, state: Any) -> list[Tensor]:
    """Return the outputs, the state after, and the gradients of the inputs and of the state."""
    q, k, v, starts = text
    inputs = (q, k, v, *laws.state_tensors(state))
    leaves = [t.requires_grad_() for t in inputs if t is not None and t.is_floating_point() and t.is_leaf]
    y, after = attention(q, k, v, state, starts)
    outputs = [y, *(t for t in laws.state_tensors(after) if t.is_floating_point())]
    slopes = [torch.ones_like(t).cumsum(-1) for t in outputs]
    return [*outputs, *torch.autograd.grad(outputs, leaves, slopes, materialize_grads=True)]


def softmax(kv_heads: int = HEADS, value_dim: int = VALUE_DIM) -> SoftmaxAttention:
    attention = SoftmaxAttention(HEADS, HEAD_DIM, value_dim)
    attention.group_heads(kv_heads)
    return attention


def window(size: int) -> WindowAttention:
    return WindowAttention(HEADS, HEAD_DIM, VALUE_DIM, size)


@thinned(
    pytest.mark.parametrize(
        ("attention", "tokens"),
        [
            (softmax(), 0),
            (softmax(2), 1),
            (softmax(1), 3 * BLOCK),
            (softmax(), 3 * BLOCK),
            (softmax(2), 3 * BLOCK + 9),
            (window(1), 0),
            (window(100), 99),
            (window(2 * BLOCK + 40), 2 * BLOCK + 39),
        ],
        ids=["none", "one", "blocks, one key head", "blocks", "393, grouped", "window-1", "window-100", "window-296"],
    ),
    pytest.mark.parametrize("starts", [[], [1, 100, BLOCK - 1, 2 * BLOCK, 300], [BLOCK], [0], None], ids=str),
)
def test_both_policies_agree_after_unused_tokens(
    attention: CausalAttention, tokens: int, starts: list[int] | None
) -> None:
    marks = None if starts is None else torch.zeros(2, 333, dtype=torch.bool)
    if marks is not None:
        marks[0, starts] = True  # the second row continues its document
    results = []
    for policy in (CPU_POLICY, GPU_POLICY):
        use_policy(attention, policy)
        text = random_text(attention, 333, torch.float64, starts=False if marks is None else marks)
        results.append(computed(attention, text, past(attention, tokens)))
    for mine, truth in zip(*results, strict=True):
        assert laws.error(mine, truth) < 1e-12


def dense(blocks: BlockList, columns: int) -> Tensor:
    """Return (B, M, N), true for the blocks in the list."""
    length, listed = blocks.length[:, 0], blocks.columns[:, 0]
    result = torch.zeros(*listed.shape[:2], columns, dtype=torch.bool)
    for row in range(len(length)):
        for block, size in enumerate(length[row].tolist()):
            result[row, block, listed[row, block, :size].long()] = True
    return result


@pytest.mark.parametrize("window", [None, 1, 100, BLOCK, 300])
@pytest.mark.parametrize(("time", "tokens"), [(2, 0), (BLOCK, BLOCK), (700, 0), (555, 333), (129, 777)])
def test_lists_name_each_block_that_is_seen(time: int, tokens: int, window: int | None) -> None:
    draw = torch.Generator().manual_seed(0)
    current = torch.rand(3, tokens, generator=draw) < torch.tensor([[0.5], [1.0], [0.0]])
    starts = torch.rand(3, time, generator=draw) < torch.tensor([[1 / 100], [0], [1 / 300]])
    visible = visible_keys(current, starts, time, window)
    mask = visible.mask()
    rows, columns = (-(-size // BLOCK) for size in mask.shape[1:])
    partial, full, partial_by_key, full_by_key = block_lists(visible)
    for name, by_query, by_key in (("partial", partial, partial_by_key), ("full", full, full_by_key)):
        assert torch.equal(dense(by_query, columns), dense(by_key, rows).mT), name
    for row in range(3):
        for m in range(rows):
            for n in range(columns):
                block = mask[row, m * BLOCK : (m + 1) * BLOCK, n * BLOCK : (n + 1) * BLOCK]
                is_partial, is_full = (bool(dense(x, columns)[row, m, n]) for x in (partial, full))
                assert is_full == (bool(block.all()) and block.shape[1] == BLOCK)
                assert is_partial >= (bool(block.any()) and not is_full) and not (is_partial and is_full)
                if row == 1:  # without unused keys, no block is listed in vain
                    assert (is_partial or is_full) == bool(block.any())


class Largest(Allocations):
    """Counts operations, and notes the bytes of the largest tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()
        self.bytes = 0

    def call(self, function: Any, args: Any, kwargs: Any) -> Any:
        result = super().call(function, args, kwargs)
        self.operations[str(function)] += 1
        self.bytes = max([self.bytes, *(x.nbytes for x in tree_leaves(result) if isinstance(x, Tensor))])
        return result


@pytest.mark.parametrize("with_starts", [False, True])
@pytest.mark.parametrize(
    "attention",
    [SoftmaxAttention(12, 64, 64), WindowAttention(12, 64, 64, 1024)],
    ids=["softmax", "window"],
)
def test_operations_do_not_grow_and_memory_is_linear(attention: CausalAttention, with_starts: bool) -> None:
    """No value is read either, which a tensor without values would refuse."""
    attention.group_heads(4)
    use_policy(attention, GPU_POLICY)
    counts = {}
    for time in (4096, 65536):
        with FakeTensorMode():
            q, k, v = (torch.zeros(1, heads, time, 64, requires_grad=True) for heads in (12, 4, 4))
            starts = torch.zeros(1, time, dtype=torch.bool) if with_starts else None
            with Largest() as seen:
                y, _ = attention(q, k, v, attention.init_state(1, q.device, q.dtype), starts)
                y.sum().backward()
        counts[time] = seen.operations
        assert seen.bytes <= 4 * 12 * 64 * (time + 1023)
    assert counts[4096] == counts[65536]


@pytest.mark.parametrize(
    ("policy", "dtype", "value_dim", "key_heads"),
    [
        (GPU_POLICY, torch.bfloat16, HEAD_DIM, 2),
        (GPU_POLICY, torch.bfloat16, VALUE_DIM, 4),
        (GPU_POLICY, torch.float32, HEAD_DIM, 4),
        (CPU_POLICY, torch.float32, HEAD_DIM, 2),
    ],
)
def test_only_flash_attention_gets_grouped_heads(
    policy: DevicePolicy, dtype: torch.dtype, value_dim: int, key_heads: int
) -> None:
    """A GPU's other kernels would compute a matrix of all pairs for them."""
    attention = softmax(2, value_dim)
    use_policy(attention, policy)
    q, k, v, *_ = random_text(attention, 9, dtype, starts=False)
    with patch.object(layer, "scaled_dot_product_attention", wraps=scaled_dot_product_attention) as fused:
        y, _ = attention(q, k, v, attention.init_state(2, q.device, dtype))
    assert laws.error(y, attention.reference(q, k, v)) < 0.01
    assert [x.shape[1] for x in fused.call_args.args] == [4, key_heads, key_heads]


def text_for_flex(
    time: int, tokens: int, window: int | None = None, widths: tuple[int, int] = (32, 32)
) -> tuple[Tensor, Tensor, Tensor, VisibleKeys]:
    draw = torch.Generator().manual_seed(time)
    q = torch.randn(2, 4, time, widths[0], generator=draw)
    k, v = (torch.randn(2, 2, tokens + time, width, generator=draw) for width in widths)
    current = torch.rand(2, tokens, generator=draw) < 0.8
    starts = torch.rand(2, time, generator=draw) < 0.01
    return q, k, v, visible_keys(current, starts, time, window)


def by_mask(q: Tensor, k: Tensor, v: Tensor, visible: VisibleKeys) -> Tensor:
    return scaled_dot_product_attention(q, k, v, visible.mask()[:, None], enable_gqa=True)


@pytest.fixture
def compile_with(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Set options of torch.compile."""
    plain = torch.compile

    def use(**options: Any) -> None:
        monkeypatch.setattr(torch, "compile", lambda function, **others: plain(function, **{**others, **options}))

    torch._dynamo.reset()
    block_sparse.compiled_kernel.cache_clear()
    yield use
    block_sparse.compiled_kernel.cache_clear()


@torch.no_grad()
def test_flex_attention_has_one_kernel_for_all_lengths(compile_with: Callable[..., None]) -> None:
    counter = CompileCounter()
    compile_with(backend=counter)
    for time, tokens in ((600, 0), (410, 0), (1000, 0), (410, 600)):
        x = text_for_flex(time, tokens)
        assert laws.error(by_flex_attention(*x), by_mask(*x)) < 1e-6
    assert counter.frame_count == 1


def test_devices_without_the_kernels_have_a_mask(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("cpu", "mps"):
        assert not device_policy.policy_of(torch.device(name)).block_sparse
    for runs in (True, False):
        monkeypatch.setattr(device_policy, "RUNS_TRITON", runs)
        assert device_policy.policy_of(torch.device("cuda")).block_sparse == runs
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))  # without a C compiler
    assert not device_policy.can_run_triton()


@pytest.mark.slow
@needs_compiler
@torch.no_grad()
@pytest.mark.parametrize(("time", "tokens", "window"), [(600, 0, None), (600, 777, None), (600, 199, 200)])
def test_the_compiled_kernel_reads_the_lists(
    time: int,
    tokens: int,
    window: int | None,
    compile_with: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compiled for a CPU, flex_attention skips blocks too, but has no backward pass, and torch 2.13 cannot compile it
    for all lengths."""
    monkeypatch.setattr(torch._dynamo, "maybe_mark_dynamic", lambda *_: None)
    compile_with()
    x = text_for_flex(time, tokens, window)
    assert laws.error(by_flex_attention(*x), by_mask(*x)) < 1e-6

    def without_last(visible: VisibleKeys) -> Any:
        partial, *rest = block_lists(visible)
        return type(block_lists(visible))(partial._replace(length=(partial.length - 1).clamp(min=0)), *rest)

    monkeypatch.setattr(block_sparse, "block_lists", without_last)
    assert laws.error(by_flex_attention(*x), by_mask(*x)) > 0.1


@torch.no_grad()
def test_heads_narrower_than_the_kernels(compile_with: Callable[..., None]) -> None:
    shapes = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        (node,) = (node for node in graph.graph.nodes if "flex_attention" in str(node.target))
        shapes.append([x.meta["example_value"].shape[3] for x in node.args[:3]])
        return graph.forward

    compile_with(backend=backend)
    x = text_for_flex(30, 0, widths=(8, 24))
    assert laws.error(by_flex_attention(*x), by_mask(*x)) < 1e-6
    assert shapes == [[16, 16, 24]]
