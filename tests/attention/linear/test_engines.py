"""What computes the spans of a scan, native code and torch, in float32 and bfloat16, against the same in float64."""

import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from attention.cases import HEADS
from attention.scans import Identity, ScanInputs, linear_scan
from grids import thinned
from machine import needs_compiler, on_older_processors
from torch import Tensor

from lmlong import recipe
from lmlong.attention import laws
from lmlong.attention.feature_maps import FeatureMap
from lmlong.attention.linear import native
from lmlong.attention.linear.chunk import ChunkKernel
from lmlong.attention.linear.native import NativeLinear
from lmlong.attention.registry import FEATURE_MAPS
from lmlong.attention.scan import Kernel
from lmlong.native import build

KEYS, VALUES = 20, 11
"""Widths: no multiples of anything, and not the same."""

ENGINES = {kernel.name: kernel for kernel in (NativeLinear(), ChunkKernel())}
EXACT = {torch.float32: 3e-6, torch.bfloat16: 4e-2}


class Text:
    """A random text in float64, a state before it and the gradients of what is made of them."""

    def __init__(self, time: int, starts: list[int] | None = None, decay: bool | int = False, width: int = KEYS):
        self.draw = torch.Generator().manual_seed(time)
        self.q, self.k, self.v = (self.normal(2, HEADS, time, size) for size in (width, width, VALUES))
        self.starts = None
        if starts is not None:
            self.starts = torch.zeros(2, time, dtype=torch.bool)
            self.starts[0, [place for place in starts if place < time]] = True  # the other row has none
        channels = () if isinstance(decay, bool) else (decay,)  # or a decay for each of so many
        self.log_decay = -(self.normal(2, HEADS, time, *channels) ** 2) / 10 if decay else None
        self.dy = self.normal(2, HEADS, time, VALUES)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.draw, dtype=torch.float64)

    def read(self, by: Kernel, features: FeatureMap, dtype: torch.dtype, size: int) -> Iterator[tuple[str, Tensor]]:
        """By name, outputs, states and all gradients; `size` is that of the features."""
        sums = torch.promote_types(dtype, torch.float32)
        draw = torch.Generator().manual_seed(0)
        S = torch.randn(2, HEADS, size, VALUES, generator=draw, dtype=torch.float64).to(sums).requires_grad_()
        z = torch.rand(2, HEADS, size, generator=draw, dtype=torch.float64).to(sums).requires_grad_()
        x = [x.to(dtype).requires_grad_() for x in (self.q, self.k, self.v)]
        gates = None if self.log_decay is None else self.log_decay.to(sums).requires_grad_()
        leaves = {"q": x[0], "k": x[1], "v": x[2], "S": S, "z": z} | ({} if gates is None else {"gates": gates})
        y, *state = linear_scan(by, features, ScanInputs(x[0], x[1], x[2], self.starts, gates), S, z)
        yield from zip(("y", "S after", "z after"), (y, *state), strict=True)
        weights = list(features.parameters())
        loss = (y * self.dy.to(y.dtype)).sum() + sum(one.sum() for one in state) / 10
        found = torch.autograd.grad(loss, [*leaves.values(), *weights])
        yield from zip((*(f"d{name}" for name in leaves), *(f"dw{n}" for n in range(len(weights)))), found, strict=True)


def assert_exact(text: Text, by: Kernel, features: FeatureMap, dtype: torch.dtype, size: int = KEYS) -> None:
    wide = features.double()
    truth = dict(text.read(ChunkKernel(), wide, torch.float64, size))
    narrow = features.float()
    for name, found in text.read(by, narrow, dtype, size):
        assert laws.error(found.detach(), truth[name].detach()) < EXACT[dtype], name


def feature_map(name: str) -> FeatureMap:
    torch.manual_seed(0)
    return FEATURE_MAPS[name](HEADS, KEYS, recipe.Attention(feature_map=name, taylor=recipe.Taylor(width=4)))  # type: ignore[arg-type]


every_engine = pytest.mark.parametrize("by", ENGINES.values(), ids=ENGINES)
each_type = pytest.mark.parametrize("dtype", EXACT, ids=str)


@each_type
@every_engine
@thinned(
    pytest.mark.parametrize("time", [1, 15, 16, 17, 63, 100, 530]),
    pytest.mark.parametrize("starts", [None, [0], [3, 4, 15, 16, 40, 99, 512]], ids=str),
    pytest.mark.parametrize("decay", [False, True, KEYS], ids=["kept", "decaying", "by-channel"]),
)
def test_outputs_states_and_gradients(
    by: Kernel, dtype: torch.dtype, time: int, starts: list[int] | None, decay: bool | int
) -> None:
    assert_exact(Text(time, starts, decay), by, feature_map("elu"), dtype)


@every_engine
@each_type
@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_every_feature_map(by: Kernel, dtype: torch.dtype, name: str) -> None:
    features = feature_map(name)
    # what torch makes of bfloat16 inputs is rounded to it
    assert_exact(Text(70, [50], decay=True), by, features, dtype, features.features)


@every_engine
def test_features_that_are_given(by: Kernel) -> None:
    text = Text(40)
    text.q, text.k = text.q.abs(), text.k.abs()
    assert_exact(text, by, Identity(), torch.float32)


@every_engine
@pytest.mark.parametrize("channels", [(), (KEYS,)], ids=["by-head", "by-channel"])
def test_long_memories_are_exact(by: Kernel, channels: tuple[int, ...]) -> None:
    """A rounding of what a chunk keeps of the state is one of every later token."""
    text = Text(6000)
    text.log_decay = torch.full((2, HEADS, 6000, *channels), -1 / 8192)
    found, truth = (dict(text.read(by, feature_map("elu"), dtype, KEYS)) for dtype in (torch.float32, torch.float64))
    for name in ("S after", "z after"):
        assert laws.error(found[name].detach(), truth[name].detach()) < 2e-6, name


@pytest.mark.parametrize("width", [2, 16, 33])
def test_any_width(width: int) -> None:
    features = FEATURE_MAPS["relu"](HEADS, width, recipe.Attention())
    assert_exact(Text(50, decay=True, width=width), NativeLinear(), features, torch.float32, width)


@pytest.mark.parametrize(
    "lay", [lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), lambda x: x.mT.contiguous().mT]
)
def test_however_inputs_lie(lay) -> None:  # type: ignore[no-untyped-def]
    text, other = Text(600), Text(600)
    other.q, other.k, other.v, other.dy = (lay(x) for x in (text.q, text.k, text.v, text.dy))
    pairs = zip(*(x.read(NativeLinear(), feature_map("elu"), torch.float32, KEYS) for x in (text, other)), strict=True)
    assert all(torch.equal(mine, found) for (_, mine), (_, found) in pairs)


@pytest.mark.parametrize(("gates", "starts"), [(torch.float64, torch.bool), (torch.bfloat16, torch.long)])
def test_gates_and_starts_of_other_types_are_converted(gates: torch.dtype, starts: torch.dtype) -> None:
    text = Text(70, [30], decay=True)
    assert text.log_decay is not None and text.starts is not None
    q, k, v = (x.float() for x in (text.q, text.k, text.v))
    S, z = torch.zeros(2, HEADS, KEYS, VALUES), torch.zeros(2, HEADS, KEYS)
    other, same = text.log_decay.to(gates), text.log_decay.to(gates).float()
    y, *_ = linear_scan(NativeLinear(), feature_map("elu"), ScanInputs(q, k, v, text.starts.to(starts), other), S, z)
    expected, *_ = linear_scan(NativeLinear(), feature_map("elu"), ScanInputs(q, k, v, text.starts, same), S, z)
    assert torch.equal(y, expected)


def test_the_number_of_threads_changes_nothing() -> None:
    threads, text = torch.get_num_threads(), Text(300, [100], decay=True)
    found = []
    for number in (1, 2, 5):
        torch.set_num_threads(number)
        found.append(list(text.read(NativeLinear(), feature_map("elu"), torch.float32, KEYS)))
    torch.set_num_threads(threads)
    for (_, one), (_, two), (_, five) in zip(*found, strict=True):
        assert torch.equal(one, two) and torch.equal(one, five)


@each_type
@pytest.mark.parametrize("name", ["elu", "relu"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_is_not_hidden(dtype: torch.dtype, name: str, value: float) -> None:
    text = Text(40)
    text.k[0, 0, 20, 3] = value
    (_, y), *_ = text.read(NativeLinear(), feature_map(name), dtype, KEYS)
    assert not y[0, 0, 20:].isfinite().any(), "later outputs know of it"
    assert y[0, 0, :16].isfinite().all() and y[0, 1:].isfinite().all() and y[1].isfinite().all()


@needs_compiler
def test_bfloat16_is_float32_rounded_at_the_end() -> None:
    text = Text(200, [70], decay=True)
    text.q, text.k, text.v = (x.bfloat16() for x in (text.q, text.k, text.v))
    (_, y), (_, S), _, *_ = text.read(NativeLinear(), feature_map("elu"), torch.bfloat16, KEYS)
    (_, wide), (_, wide_S), _, *_ = text.read(NativeLinear(), feature_map("elu"), torch.float32, KEYS)
    assert torch.equal(y, wide.bfloat16()) and torch.equal(S, wide_S)


def test_no_number_with_all_bits_set_is_not_rounded_to_one() -> None:
    text = Text(40, decay=True)
    assert text.log_decay is not None
    text.log_decay = text.log_decay.float()
    text.log_decay[0, 0, 20] = torch.tensor(-1, dtype=torch.int32).view(torch.float32)
    (_, y), *_ = text.read(NativeLinear(), feature_map("elu"), torch.bfloat16, KEYS)
    assert y[0, 0, 20:].isnan().all() and y[0, 0, :16].isfinite().all()


@needs_compiler
@on_older_processors
def test_processors_with_fewer_lanes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: list[str]) -> None:
    others = [flag for flag in build.FLAGS if flag != "-march=native"]
    found = compiled_anew(monkeypatch, tmp_path, flags=(*others, *flags))
    assert found is not None and list(tmp_path.glob("native/*/code.so"))
    for decay in (True, KEYS):
        assert_exact(Text(100, [40], decay), NativeLinear(), feature_map("elu"), torch.float32)


@needs_compiler
def test_it_is_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiled_anew(monkeypatch, tmp_path)
    (made,) = tmp_path.glob("native/*/code.so")
    when = made.stat().st_mtime_ns
    compiled_anew(monkeypatch, tmp_path)
    assert made.stat().st_mtime_ns == when and len(list(tmp_path.glob("native/*"))) == 1


def test_without_a_compiler_torch_takes_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "none")
    assert compiled_anew(monkeypatch, tmp_path) is None
    assert_exact(Text(40), NativeLinear(), feature_map("elu"), torch.float32)


def test_a_compiler_that_fails_is_named_and_torch_takes_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken-compiler"
    broken.write_text("#!/bin/sh\necho 'no such header' >&2; exit 1\n")
    broken.chmod(broken.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.warns(
        UserWarning, match=r"by torch, slower: .*broken-compiler could not compile native code:\nno such header"
    ):
        assert compiled_anew(monkeypatch, tmp_path) is None
    assert_exact(Text(40), NativeLinear(), feature_map("elu"), torch.float32)
    assert not [path for path in (tmp_path / "native").iterdir() if shutil.which(path.name)]


@needs_compiler
def test_structures_of_another_layout_do_not_compile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shutil.copytree(native.CODE, tmp_path / "scan", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    job = (build.SHARED_HEADERS / "scan_job.h").read_text()
    swapped = job.replace("StridedTensor q, k, v,", "StridedTensor k, q, v,")
    assert swapped != job
    for header in ("scan_job.h", "decay.h", "chunk_features.h"):  # beside what includes them they come first
        (tmp_path / "scan" / header).write_text(
            swapped if header == "scan_job.h" else (build.SHARED_HEADERS / header).read_text()
        )
    monkeypatch.setattr(native, "CODE", tmp_path / "scan")
    with pytest.warns(UserWarning, match=r"ScanJob\.q has another offset or size in Python"):
        assert compiled_anew(monkeypatch, tmp_path) is None


def compiled_anew(monkeypatch: pytest.MonkeyPatch, folder: Path, flags: tuple[str, ...] = build.FLAGS) -> object:
    """The library as a process would find it that begins now, with an empty cache in this folder."""
    monkeypatch.setenv("LMLONG_CACHE", str(folder))
    monkeypatch.setattr(build, "FLAGS", flags)
    native.library.cache_clear()
    return native.library()


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What was compiled in a test is not that of the next."""
    yield
    native.library.cache_clear()
