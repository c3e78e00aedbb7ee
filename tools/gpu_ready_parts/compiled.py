"""Compile the Triton kernels of attention for NVIDIA GPUs, and check what the compiler reports of each.

Triton's package contains the whole compiler for NVIDIA GPUs, so this needs no GPU. Each configuration is a launch of
the real operation, forward and backward, recorded with tensors that have no data. As a program, this compiles a share
of the configurations.
"""

import argparse
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, count, product
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

SHARED = {80: 163, 89: 99, 90: 227, 100: 227}
"""Shared memory of a program in KiB, at most, by architecture (sm_80: A100, sm_89: RTX 4090, sm_90: H100, sm_100:
B200)."""

MAX_SPILLS = 256
"""Bytes that a thread may store outside its registers."""

MAX_SECONDS = 20.0
"""Time to compile a kernel."""

TENSOR_CORES = {"wgmma": "wgmma.mma_async", "tcgen05": "tcgen05.mma", "mma": "mma.sync"}
"""The instructions of tensor cores, as they are called in PTX."""

WITHOUT_PRODUCTS = ("accumulate_states", "denominator_grads", "decay_grads")
"""Kernels that multiply no matrices."""

PROCESSES = 2

HEADER = (
    f"{'kernel':29} {'state':>7} {'dtype':8} {'map':8} {'gates':12} arch  shared  regs spills  {'tensor cores':13}    s"
)


class Problem(NamedTuple):
    """A scan whose kernels are compiled."""

    dtype: str
    features: int
    values: int
    feature_map: str = "elu"
    decays: bool = True
    starts: bool = True
    kernels: tuple[str, ...] | None = None  # None for all


PRODUCTS = ("scan_states", "tile_outputs", "backward_qk", "backward_v")
DTYPES = ("bfloat16", "float32")

PROBLEMS = (
    *(Problem(dtype, 64, 64) for dtype in DTYPES),
    *(Problem(dtype, width, width, kernels=PRODUCTS) for dtype, width in product(DTYPES, (16, 32, 128, 256))),
    *(Problem(dtype, 64, 64, decays=False, starts=False, kernels=PRODUCTS) for dtype in DTYPES),
    Problem("bfloat16", 64, 64, decays=False, kernels=PRODUCTS),
    Problem("bfloat16", 64, 64, starts=False, kernels=PRODUCTS),
    Problem("bfloat16", 64, 64, "relu", kernels=PRODUCTS),
    Problem("bfloat16", 64, 128, kernels=PRODUCTS),
    Problem("bfloat16", 20, 11, kernels=PRODUCTS),  # no vectors are loaded
    *(Problem(dtype, 256, 64, "identity", kernels=PRODUCTS) for dtype in DTYPES),  # FAVOR+
    Problem("bfloat16", 160, 64, "identity", kernels=PRODUCTS),  # Taylor, projected to 16, padded
)
FLEX = (
    *(Problem("bfloat16", width, width, "flex", decays=False) for width in (16, 32, 64, 128, 256)),
    *(Problem("float32", width, width, "flex", decays=False) for width in (16, 32, 64, 128)),  # 256 spills 784 bytes
)
"""Softmax attention and windows, whose kernels torch.compile makes of flex attention."""
QUICK = (Problem("bfloat16", 16, 16, kernels=("tile_outputs", "backward_v")),)


def check(quick: bool, report: Callable[[str], None]) -> tuple[list[dict[str, Any]], list[str]]:
    """Compile all configurations, or a few, in processes of their own. Return a row for each, and what is not as it
    should be; report both as lines."""
    rows: list[dict[str, Any]] = []
    report(HEADER)
    with ThreadPoolExecutor(PROCESSES) as pool:
        for share in pool.map(lambda part: _in_process(quick, part, report), range(PROCESSES)):
            rows += share
    failures = [failure for row in rows for failure in failures_of(row)]
    return rows, failures


def failures_of(row: dict[str, Any]) -> list[str]:
    """Return what is not as it should be with a compiled kernel."""
    what = f"{row['kernel']} {row['features']} x {row['values']} {row['dtype']} sm_{row['arch']}"
    if row["error"]:
        return [f"{what}: {row['error']}"]
    failures, cores = [], row["tensor_cores"]
    if row["shared"] > SHARED[row["arch"]] * 1024:
        failures.append(f"{what}: shared memory of {row['shared'] / 1024:.0f} KiB exceeds {SHARED[row['arch']]} KiB")
    if row["spills"] > MAX_SPILLS:
        failures.append(f"{what}: {row['spills']} bytes of spills exceed {MAX_SPILLS}")
    if row["seconds"] > MAX_SECONDS:
        failures.append(f"{what}: {row['seconds']:.0f} s to compile exceed {MAX_SECONDS:.0f} s")
    wide = min(row["features"], row["values"]) >= 64 and not row["kernel"].startswith("flex")
    if row["kernel"] not in WITHOUT_PRODUCTS and not (cores.get("wgmma") if row["arch"] == 90 and wide else cores):
        failures.append(f"{what}: does not use {'wgmma' if row['arch'] == 90 and wide else 'tensor cores'}")
    return failures


def line(row: dict[str, Any]) -> str:
    """Return a row of the table."""
    kernel, state = f"{row['kernel']} {row['variant']}", f"{row['features']}x{row['values']}"
    what = f"{kernel:29} {state:>7} {row['dtype']:8} {row['map']:8} {row['gates']:12} {row['arch']:4}"
    if row["error"]:
        return f"{what}  FAILED {row['error']}"
    cores = " ".join(f"{count} {name}" for name, count in row["tensor_cores"].items())
    return (
        f"{what} {row['shared'] / 1024:7.1f} {row['registers']:5} {row['spills']:6}  {cores:13} {row['seconds']:4.1f}"
    )


def _in_process(quick: bool, part: int, report: Callable[[str], None]) -> list[dict[str, Any]]:
    """Compile a share of the configurations in another process: Triton compiles one kernel at a time, and the compiler
    does not exist where TRITON_INTERPRET is set."""
    command = [sys.executable, __file__, str(part), *(["--quick"] if quick else [])]
    root = Path(__file__).resolve().parents[2]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join([str(root), str(root / "tools"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment |= {"TRITON_ALWAYS_COMPILE": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    environment.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # otherwise Triton 3.9 warns that its default will change
    rows = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for text in process.stdout:
            rows.append(json.loads(text))
            report(line(rows[-1]))
    if process.returncode:
        raise RuntimeError(f"compiling stopped with exit code {process.returncode}")
    return rows


class Launch(NamedTuple):
    """A launch of a kernel, which is one configuration to compile."""

    problem: Problem
    kernel: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.kernel.__name__).removeprefix("triton_")

    @property
    def variant(self) -> str:
        """What distinguishes launches of the same kernel."""
        named = dict(zip(self.kernel.arg_names, self.arguments, strict=False)) | self.options
        directions: dict[Any, str] = {True: "back", False: "forth"}
        direction = directions.get(named.get("BACKWARDS"), "")
        return direction + (" tiles" if named.get("S_tiles") is not None and self.name == "scan_states" else "")


def launches(problem: Problem) -> list[Launch]:
    """Return the launches of the forward and the backward pass of a problem, without repetitions."""
    import torch

    from lmlong.attention.linear.triton import operation

    recorded: list[Launch] = []

    class Recorder:
        def __init__(self, kernel: Any):
            self.kernel = kernel

        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return lambda *arguments, **options: recorded.append(Launch(problem, self.kernel, arguments, options))

    batch, heads, tokens, dtype = 1, 12, 65536, getattr(torch, problem.dtype)
    with patch.object(operation, "wrap_triton", Recorder), torch.device("meta"):
        q, k = (torch.empty(batch, tokens, heads, problem.features, dtype=dtype).transpose(1, 2) for _ in range(2))
        v = torch.empty(batch, tokens, heads, problem.values, dtype=dtype).transpose(1, 2)
        starts = torch.empty(batch, tokens, dtype=torch.bool) if problem.starts else None
        log_decay = torch.empty(batch, tokens, heads).mT if problem.decays else None
        state = torch.empty(batch, heads, problem.features, problem.values + 1)
        inputs = (q, k, v, starts, log_decay)
        y, after, *saved = operation.scan(*inputs, state, problem.feature_map)
        operation.scan_backward(*inputs, y, *saved, y, after, problem.feature_map, problem.decays)  # type: ignore[call-arg, arg-type]
    kept = [launch for launch in recorded if problem.kernels is None or launch.name in problem.kernels]
    return list({_key(launch): launch for launch in kept}.values())


def _key(launch: Launch) -> str:
    """Return what distinguishes the compiled form of a launch."""
    return f"{launch.name} {[getattr(x, 'dtype', x) for x in launch.arguments]} {launch.options}"


def configurations(problems: tuple[Problem, ...]) -> list[Launch]:
    return [launch for problem in problems for launch in launches(problem)]


def flex_launches(problem: Problem) -> list[Launch]:
    """Return the launches of flex attention, forward and backward."""
    import torch

    from gpu_ready_parts import flex

    return [Launch(problem, *kernel) for kernel in flex.kernels(getattr(torch, problem.dtype), problem.features)]


class Target:
    """The part of a driver that Triton asks for to compile for a GPU that is not there."""

    numbers = count()

    def __init__(self, arch: int):
        self.arch, self.device = arch, next(self.numbers)

    def get_current_device(self) -> int:
        return self.device  # a new one for each compilation: Triton keeps the kernels of a device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)


def compile_for(launch: Launch, arch: int) -> dict[str, Any]:
    """Compile a kernel, and return what the compiler reports."""
    import triton
    from triton.runtime import driver

    problem, log, begin = launch.problem, io.StringIO(), cpu_seconds()
    gates = "+".join(name for name, used in (("decay", problem.decays), ("starts", problem.starts)) if used) or "-"
    row: dict[str, Any] = {
        "kernel": launch.name,
        "variant": launch.variant,
        "features": problem.features,
        "values": problem.values,
        "dtype": problem.dtype,
        "map": problem.feature_map,
        "gates": gates,
        "arch": arch,
        "error": None,
    }
    driver.set_active(Target(arch))
    triton.knobs.nvidia.dump_ptxas_log = True  # printed
    try:
        with contextlib.redirect_stdout(log):
            compiled = launch.kernel.warmup(*launch.arguments, grid=(1,), **launch.options)
    except Exception as error:
        cause = error.__cause__ or error  # Triton's own error quotes the kernel up to the line
        return row | {"error": " ".join(f"{type(error).__name__}: {cause}".split())}
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", log.getvalue())
    registers, ptx = re.search(r"Used (\d+) registers", log.getvalue()), compiled.asm["ptx"]
    assert registers is not None and spills
    return row | {
        "shared": compiled.metadata.shared,
        "registers": int(registers[1]),
        "spills": max(map(int, spills)),
        "tensor_cores": {name: ptx.count(code) for name, code in TENSOR_CORES.items() if code in ptx},
        "seconds": round(cpu_seconds() - begin, 2),
        "blocks": {name: value for name, value in launch.options.items() if name.startswith(("BLOCK", "num"))},
    }


def cpu_seconds() -> float:
    """Return the CPU time of this process and of the compilers that it ran, which other programs do not slow down."""
    return sum(os.times()[:4])


def _compile_part(quick: bool, part: int) -> Iterator[dict[str, Any]]:
    """Compile every PROCESSES-th configuration."""
    found = configurations(QUICK if quick else PROBLEMS)[part::PROCESSES]
    for launch in chain(found, *map(flex_launches, () if quick else FLEX[part::PROCESSES])):
        for arch in SHARED:
            yield compile_for(launch, arch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", type=int)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        for row in _compile_part(options.quick, options.part):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
