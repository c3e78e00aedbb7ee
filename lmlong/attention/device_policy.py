"""How computations are divided on a device: into parts that fit a CPU's cache, or into few large operations on a GPU.

Every operation on a GPU takes some microseconds to launch, so there the number of operations must not depend on the
length of a text. And an operation whose result decides what is launched next would make the CPU wait for the GPU.
"""

import os
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class DevicePolicy(NamedTuple):
    """The sizes of the parts, and whether the CPU may read values."""

    span_bytes: int | None
    """Memory for the temporary tensors of a span of a scan; None for spans of SPAN tokens (scan.py)."""

    logit_tokens: int | None
    """Maximum tokens whose logits are in memory at once; None if only `logits` limits them."""

    logits: int
    """Maximum number of logits in memory at once."""

    piece_tokens: int
    """Tokens of all rows of a batch that are read at once in a long text, if not more of each row are read anyway."""

    reads_values: bool
    """Whether reading a value costs nothing, so that code may branch on it."""

    block_sparse: bool
    """Whether softmax attention skips blocks of keys that no query sees (block_sparse.py), or has a mask of all
    pairs."""

    rounds_inputs: bool
    """Whether products with weights in bfloat16 round their inputs to it: what tensor cores multiply."""

    native_rows: bool
    """Whether native code computes norms, gates, convolutions and the loss, where it can (lmlong/native/rows)."""

    compiles: bool = False
    """Whether torch.compile runs the model."""


CPU_POLICY = DevicePolicy(
    span_bytes=None,
    logit_tokens=512,
    logits=2**22,
    piece_tokens=0,
    reads_values=True,
    block_sparse=False,
    rounds_inputs=False,
    native_rows=True,
)
"""Temporary tensors stay in cache. For blocks of memory above 32 MiB malloc maps fresh pages each time, which takes
longer than the arithmetic: 2^22 logits in float32 are half of that."""

GPU_POLICY = DevicePolicy(
    span_bytes=2 * 10**9,
    logit_tokens=None,
    logits=2**27,
    piece_tokens=2**16,
    reads_values=False,
    block_sparse=True,
    rounds_inputs=True,
    native_rows=False,
)
"""The number of operations does not depend on the length, up to a limit of memory, and nothing waits for a value."""


def can_run_triton() -> bool:
    """Return whether Triton is installed, and the C compiler and the header of Python that its kernels need."""
    compiler = os.environ.get("CC") or which("gcc") or which("clang")
    header = Path(sysconfig.get_config_var("INCLUDEPY") or "", "Python.h")
    return find_spec("triton") is not None and compiler is not None and header.exists()


RUNS_TRITON = can_run_triton()


def policy_of(device: torch.device) -> DevicePolicy:
    if device.type == "cpu":
        return CPU_POLICY
    return GPU_POLICY._replace(block_sparse=device.type == "cuda" and RUNS_TRITON)


class FollowsPolicy(nn.Module):
    """A module whose computation depends on the device policy."""

    policy: DevicePolicy | None = None
    """None for the policy of the device of the inputs."""

    def policy_for(self, x: Tensor) -> DevicePolicy:
        return self.policy or policy_of(x.device)


def use_policy(model: nn.Module, policy: DevicePolicy | None) -> None:
    """Let a model compute by a policy, whatever its device: by the GPU's, to test that on a CPU."""
    module: Any
    for module in model.modules():
        if isinstance(module, FollowsPolicy):
            module.policy = policy
