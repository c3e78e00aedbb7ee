"""Native code is compiled for any processor, once, and reads tensors as memory, however they are stored."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from attention.cases import HEADS
from attention.scans import VALUES, WAYS, WIDTH, Identity, Way, assert_exact, in_dtype, name, scan_inputs
from grids import every_nth
from machine import needs_compiler, needs_native, on_other_processors
from torch import Tensor

from lmlong.attention.feature_maps import Elu, FeatureMap
from lmlong.attention.linear import native
from lmlong.attention.linear.layer import LinearAttention
from lmlong.attention.ngram.hashing import ngram_hashes
from lmlong.attention.ngram.native.kernel import NativeNgram
from lmlong.attention.ngram.state import empty_state
from lmlong.attention.scan import ScanInputs, Span
from lmlong.native import build, prebuilt

ROWS = 16

Function = Callable[..., Sequence[Tensor]]
"""From tensors by name to outputs and the state after."""

NATIVE = [way for way in WAYS if way.engine == "native"]
SCANS = [pytest.param(way, way.features, id=name(way)) for way in NATIVE]
SCANS.append(pytest.param(WAYS[0], Identity(WIDTH), id="linear of features"))


@needs_native
@pytest.mark.parametrize(("way", "features"), SCANS)
def test_arguments_and_gradients_of_scans_in_any_layout(way: Way, features: FeatureMap) -> None:
    x = way.inputs(70, [40])
    states = dict(zip(("S", "z") if way.normalizes else "S", (t.float() for t in way.state(x, features)), strict=True))
    if way.normalizes:
        x = x._replace(beta=None, q=x.q.abs(), k=x.k.abs())

    def scan(**tensors: Tensor) -> Sequence[Tensor]:
        inputs = ScanInputs(**{field: tensors.get(field) for field in ScanInputs._fields})  # type: ignore[arg-type]
        return way.scan(features, inputs, *(tensors[state] for state in states))

    given = in_dtype(x, torch.float32)._asdict()
    assert_the_same_in_any_layout(scan, {**{field: t for field, t in given.items() if t is not None}, **states})


@needs_native
@pytest.mark.parametrize(
    ("dtype", "kernel"), [(torch.float32, "native"), (torch.bfloat16, "native"), (torch.float64, "torch")]
)
def test_native_code_computes_the_formats_that_it_reads(dtype: torch.dtype, kernel: str) -> None:
    attention = LinearAttention(HEADS, WIDTH, VALUES, Elu(WIDTH))
    q, v = torch.zeros(1, HEADS, 4, WIDTH, dtype=dtype), torch.zeros(1, HEADS, 4, VALUES, dtype=dtype)
    x, state = Span(q, q, v, None, None, None, v), torch.zeros(1, HEADS, WIDTH, VALUES + 1)
    assert attention.kernel.suited(attention.feature_map, x, state, attention.policy_for(q)).name == kernel


@needs_native
def test_arguments_and_gradients_of_ngrams_in_any_layout() -> None:
    def read(v: Tensor, hashes: Tensor, S: Tensor, number: Tensor, ngrams: Tensor) -> Sequence[Tensor]:
        empty = empty_state(number.shape, S.shape[-1], S.device, S.dtype)
        sums, numbers, state = NativeNgram().read(v, hashes, None, empty._replace(S=S, number=number, ngram=ngrams))
        return sums, numbers, *state[:3]

    v = scan_inputs(70).v.float()
    hashes = ngram_hashes(torch.randint(3, (2, 70, 4), generator=torch.Generator().manual_seed(0)), [1, 2, 3])
    empty = empty_state((2, HEADS, ROWS), VALUES, hashes.device, torch.float32)
    after = read(v, hashes, *empty[:3])[2:]
    states = dict(zip(("S", "number", "ngrams"), after, strict=True))
    assert_the_same_in_any_layout(read, {"v": v, "hashes": hashes, **states})


def layouts(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Iterate over tensors in other layouts, with the same numbers except where they are expanded."""
    yield "transposed", x.mT.contiguous().mT
    yield "heads first", x.transpose(0, 1).contiguous().transpose(0, 1)
    yield "every second", torch.stack([x, x + 1 if x.dtype != torch.bool else x], dim=-1)[..., 0]
    for dim in range(x.ndim):
        yield f"expanded along {dim}", x.narrow(dim, 0, 1).expand_as(x)


def results(function: Function, given: dict[str, Tensor], slopes: Sequence[Tensor] | None = None) -> list[Tensor]:
    """Return outputs and all gradients; `slopes` are the gradients of the outputs."""
    leaves = {name: x.detach().requires_grad_(x.is_floating_point()) for name, x in given.items()}
    outputs = function(**leaves)
    trained = [y for y in outputs if y.requires_grad]
    slopes = [torch.ones_like(y).cumsum(-1) for y in trained] if slopes is None else slopes
    inputs = [x for x in leaves.values() if x.requires_grad]
    grads = torch.autograd.grad(trained, inputs, slopes, allow_unused=True)
    return [*(y.detach() for y in outputs), *(grad for grad in grads if grad is not None)]


def same(found: Sequence[Tensor], expected: Sequence[Any]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def assert_the_same_in_any_layout(function: Function, given: dict[str, Tensor]) -> None:
    for argument, x in given.items():
        for layout, other in layouts(x):
            contiguous = results(function, {**given, argument: other.contiguous()})
            assert same(results(function, {**given, argument: other}), contiguous), f"{argument} {layout}"

    leaves = {name: x.detach().requires_grad_(x.is_floating_point()) for name, x in given.items()}
    slopes = [torch.randn_like(y) for y in function(**leaves) if y.requires_grad]
    for number, slope in enumerate(slopes):
        for layout, other in layouts(slope):
            found, contiguous = (
                results(function, given, [*slopes[:number], one, *slopes[number + 1 :]])
                for one in (other, other.contiguous())
            )
            assert same(found, contiguous), f"output {number} {layout}"


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """An empty cache, no prebuilt libraries, and no library in memory before and after."""
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path / "prebuilt")
    monkeypatch.setenv("LMLONG_CACHE", str(tmp_path / "cache"))
    native.library.cache_clear()
    yield
    native.library.cache_clear()


@needs_compiler
@pytest.mark.usefixtures("own_cache")
@every_nth(5, on_other_processors)
def test_processors_with_other_instructions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: list[str]) -> None:
    """Compiled once, and loaded from the cache by the next process."""
    others = [flag.replace("-O3", "-O1") for flag in build.FLAGS if flag != "-march=native"]
    monkeypatch.setattr(build, "FLAGS", (*others, *flags))
    assert native.library() is not None
    for way in NATIVE[:3]:  # of linear attention
        assert_exact(way, way.inputs(100, [40]))
    (code,) = tmp_path.glob("cache/native/*/code.so")
    compiled = code.stat().st_mtime_ns
    native.library.cache_clear()
    assert native.library() is not None and code.stat().st_mtime_ns == compiled


@pytest.mark.usefixtures("own_cache")
def test_a_compiler_that_fails_is_named_and_torch_takes_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken-compiler"
    broken.write_text("#!/bin/sh\necho 'no such header' >&2; exit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    message = r"by torch, slower: .*broken-compiler could not compile native code:\nno such header"
    with pytest.warns(UserWarning, match=message):
        assert native.library() is None
    assert_exact(NATIVE[0], NATIVE[0].inputs(40))
