"""The scan of a recurrence by native code on a CPU, span by span, with heads and rows divided among the threads.

The C++ of each recurrence is in its folder `native`. The arguments and the way they are passed are shared.

B batch, H heads, T time, F features, V value dim.
"""

import ctypes
from abc import abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lmlong.attention.chunks import MIN_LOG2_DECAY, ChunkedKernel
from lmlong.attention.device_policy import DevicePolicy
from lmlong.attention.feature_maps import ELU_FLOOR, FeatureMap, Relu
from lmlong.attention.scan import Before, Kernel, Span
from lmlong.native.build import NativeLibrary, load
from lmlong.native.decode.structures import FeatureMap as NativeMap
from lmlong.native.decode.structures import ints, pointers
from lmlong.native.source import NativeCode, Shared
from lmlong.native.threads import run_on_threads

DTYPES = (torch.float32, torch.bfloat16)

PADDED_TO = 16
"""Matrix sizes are padded to multiples of this: TILE of simd.h."""


class StridedTensor(ctypes.Structure):
    """A tensor by its address and strides; its fields are explained in scan_job.h."""

    _fields_ = (*pointers("data"), *ints("row", "head", "token", "bfloat16"))


class ScanJob(ctypes.Structure):
    """The arguments of a scan; its fields are explained in scan_job.h."""

    _fields_ = (
        *ints("batch_heads", "heads", "time", "head_dim", "features", "value_dim", "feature_map", "channel_decay"),
        *((name, StridedTensor) for name in ("q", "k", "v", "document_starts", "log_decay", "beta")),
        *((name, StridedTensor) for name in ("y", "denominators", "dy", "dq", "dk", "dv", "dlog_decay", "dbeta")),
        *pointers("state_before", "state_after", "dstate_before", "dstate_after"),
        *pointers("projection", "projection_T", "favor_constants", "dscale", "scratch"),
        *ints("scratch_size", "workers_begun", "batch_heads_begun"),
    )


def scan_code(folder: Path, constants: Mapping[str, float], has_z: bool) -> NativeCode:
    """Return the code of a scan in a folder, with constants of its own. `has_z`: the last column of a state is z."""
    constants = {"MIN_LOG2_DECAY": MIN_LOG2_DECAY, "ELU_FLOOR": ELU_FLOOR, "RELU_FLOOR": Relu.FLOOR, **constants}
    integers = {"PADDED_TO": PADDED_TO, "HAS_Z": int(has_z)}
    return NativeCode(folder, Shared(constants, [NativeMap], [StridedTensor, ScanJob], integers))


def load_scan(code: NativeCode, what: str) -> NativeLibrary | None:
    """Return the library of a scan, or None if native code is unavailable."""
    library = load(code, f"{what} is computed by torch, slower")
    if library:
        library.scratch_size.restype = ctypes.c_int64
    return library


def no_native_code(device: torch.device, library: Callable[[], ctypes.CDLL | None]) -> str | None:
    """Return why native code cannot compute on a device, or None."""
    if device.type != "cpu":
        return f"native code runs on a CPU, and the device is {device.type}"
    return "there is no native code for this machine" if library() is None else None


class NativeKernel(Kernel):
    """Computes a span by native code. The feature map is computed by native code too, or by torch."""

    name = "native"

    by_torch: ClassVar[type[ChunkedKernel]]
    """The kernel for other devices and dtypes, and without a compiler."""

    weights: Mapping[str, Tensor] = MappingProxyType({})
    """The weights of the feature map, by the job fields that take them."""

    def __init__(self, native_map: NativeMap | None = None):
        self.native_map = native_map or NativeMap.IDENTITY
        self.maps_features = native_map is not None

    @classmethod
    def unavailable_reason(cls, attention: nn.Module, device: torch.device) -> str | None:
        return no_native_code(device, cls().library)

    @abstractmethod
    def library(self) -> ctypes.CDLL | None:
        """Return the library, or None if native code is unavailable."""

    @abstractmethod
    def mapped(self, features: FeatureMap) -> "NativeKernel":
        """Return the kernel for a feature map, which maps features itself if native code supports them."""

    def add_weight_grads(self, dscale: Tensor, dweights: list[Tensor]) -> None:
        """Add the gradients of the feature map's parameters, given the gradient of its scale (B, H)."""

    def suited(self, features: FeatureMap, x: Span, state: Tensor, policy: DevicePolicy) -> Kernel:
        reads = state.dtype == torch.float32 and all(part.dtype in DTYPES for part in x[:3])
        if state.device.type != "cpu" or not reads or self.library() is None:
            return self.by_torch(policy)
        return self.mapped(features)

    def forward(self, x: Span, state: Tensor) -> Tensor:
        after = torch.empty_like(state)
        run_on_threads(*self._call("scan_forward", x, state_before=state, state_after=after))
        return after

    def backward(self, x: Span, dx: Span, state: Tensor, dstate: Tensor, dweights: list[Tensor]) -> Before:
        if not self.maps_features:
            dx = dx._replace(q=x.q.new_empty(x.q.shape), k=x.k.new_empty(x.k.shape))
        before, dscale = torch.empty_like(dstate), dstate.new_empty(x.q.shape[:2])
        states = {"state_before": state, "dstate_after": dstate, "dstate_before": before}
        run_on_threads(*self._call("scan_backward", x, dx, **states, dscale=dscale))
        self.add_weight_grads(dscale, dweights)
        return Before(before, dx.q, dx.k)

    def _call(self, function: str, x: Span, dx: Span | None = None, **contiguous: Tensor) -> tuple[Any, ScanJob, int]:
        """Return a function of the library, its job on spans, and how many threads run it. `contiguous` are the tensors
        passed as plain addresses in the job."""
        (batch, heads, time, head_dim), features = x.q.shape, contiguous["state_before"].shape[2]
        job = ScanJob(batch * heads, heads, time, head_dim, features, x.v.shape[3], self.native_map)
        job.channel_decay = x.log_decay is not None and x.log_decay.ndim == 4
        for prefix, span in (("", x), ("d", dx)):
            for name, tensor in span._asdict().items() if span else ():
                if tensor is not None:
                    setattr(job, prefix + name, _strided(tensor))
        library: Any = self.library()
        job.scratch_size = library.scratch_size(ctypes.byref(job))
        workers = max(1, min(torch.get_num_threads(), batch * heads))  # one even for an empty batch
        contiguous["scratch"] = x.v.new_empty(workers, job.scratch_size, dtype=torch.float32)
        for name, tensor in {**contiguous, **self.weights}.items():
            assert tensor.is_contiguous()
            setattr(job, name, tensor.data_ptr())
        job.tensors = contiguous  # as long as the job, which has only their addresses
        return library[function], job, workers


def _strided(x: Tensor) -> StridedTensor:
    """Describe a tensor (B, H, T, ...), or document starts (B, T)."""
    assert x.ndim < 4 or x.stride(-1) == 1 or x.shape[-1] == 1
    row, head, token = (x.stride(0), 0, x.stride(1)) if x.ndim == 2 else x.stride()[:3]
    return StridedTensor(x.data_ptr(), row, head, token, x.dtype == torch.bfloat16)
