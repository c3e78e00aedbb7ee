#!/usr/bin/env python
"""Causal linear attention, ours beside that of other projects: the same inputs, forward and backward pass, in turns.

    pip install performer-pytorch linear-attention-transformer pytorch-fast-transformers flash-linear-attention
    python tools/compare/attention.py --lengths 1k,4k,16k --threads 1

Each project is optional and left out with a message where it is not installed or has nothing for this device. Before
anything is timed, the outputs of each are held against the definition in float64, with the features that the project
itself makes, and the last key is changed to see whether the first output moves; one that does not agree is timed all
the same, and says so. The last column holds the time against what the machine could do at best: the floating-point
operations and bytes of the chunked form, at the speeds of a large product of matrices and of a copy, measured in the
same run. `--only 'lmlong elu' 'fast-transformers elu'` compares these alone, at lengths where others take long.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import elu, scaled_dot_product_attention

from lmlong import recipe
from lmlong.attention.linear.naive import quadratic
from lmlong.attention.registry import CAUSAL
from lmlong.bench.timer import time_once, time_rounds
from lmlong.model.device import describe_machine
from lmlong.recipe.lengths import name_length, parse_lengths

CHUNK_SIZE = 16
CHECKED = 256
"""Tokens on which the outputs are checked."""
AGREES = 1e-3
ROWS, HEADS, WIDTH, RANDOM_FEATURES = 1, 8, 64, 128

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q, k, v (rows, heads, time, width) to outputs of the same shape."""


class Contestant(NamedTuple):
    attend: Attention
    definition: Attention  # the same, from the formula
    features: int | None  # of a head; None for softmax


def ours(feature_map: str, by: str = "native") -> Contestant:
    options = recipe.Attention(
        feature_map=feature_map,  # type: ignore[arg-type]
        decay="none",
        favor=recipe.Favor(features=RANDOM_FEATURES),
    )
    attention = CAUSAL["linear"](HEADS, WIDTH, WIDTH, options)
    attention.use_kernel(by)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention.to(q.device)(q, k, v, attention.init_state(ROWS, q.device, q.dtype))[0]

    def definition(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention.double().reference(q, k, v)

    return Contestant(attend, definition, RANDOM_FEATURES if feature_map == "favor" else WIDTH)


def torch_softmax() -> Contestant:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    return Contestant(attend, attend, None)


def fast_transformers() -> Contestant:
    from fast_transformers.causal_product import causal_dot_product

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        fq, fk = elu(q) + 1, elu(k) + 1
        denominator = torch.einsum("bhtf,bhtf->bht", fq, fk.cumsum(2))
        return causal_dot_product(fq, fk, v) / denominator[..., None]

    return Contestant(attend, lambda q, k, v: quadratic(elu(q) + 1, elu(k) + 1, v), WIDTH)


def performer_pytorch() -> Contestant:
    from performer_pytorch.performer_pytorch import FastAttention, softmax_kernel

    attention = FastAttention(WIDTH, RANDOM_FEATURES, causal=True)

    def definition(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        matrix = attention.projection_matrix.double()
        fq, fk = (
            softmax_kernel(x, projection_matrix=matrix, is_query=asked, device=x.device)
            for x, asked in ((q, True), (k, False))
        )
        return quadratic(fq, fk, v)

    return Contestant(attention, definition, RANDOM_FEATURES)


def linear_attention_transformer() -> Contestant:
    from linear_attention_transformer.linear_attention_transformer import causal_linear_attn

    attend = partial(causal_linear_attn, bucket_size=1)  # larger ones leave out the nearest tokens
    return Contestant(attend, lambda q, k, v: quadratic(q.softmax(-1), k.exp(), v), WIDTH)


def flash_linear_attention(form: str) -> Callable[[], Contestant]:
    def make() -> Contestant:
        from fla.ops import linear_attn

        run = {"chunk": linear_attn.chunk_linear_attn, "fused_chunk": linear_attn.fused_chunk_linear_attn}[form]

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            features = ((elu(x) + 1).transpose(1, 2) for x in (q, k))
            y, _ = run(*features, v.transpose(1, 2), scale=1.0, normalize=True)
            return y.transpose(1, 2)

        return Contestant(attend, lambda q, k, v: quadratic(elu(q) + 1, elu(k) + 1, v), WIDTH)

    return make


PROJECTS: dict[str, tuple[str | None, tuple[str, ...], Callable[[], Contestant]]] = {
    "lmlong elu": (None, ("cpu", "cuda"), lambda: ours("elu")),
    "lmlong elu by torch": (None, ("cpu",), lambda: ours("elu", "torch")),
    "lmlong favor": (None, ("cpu", "cuda"), lambda: ours("favor")),
    "torch softmax": (None, ("cpu", "cuda"), torch_softmax),
    "fast-transformers elu": ("fast_transformers", ("cpu", "cuda"), fast_transformers),
    "performer-pytorch favor": ("performer_pytorch", ("cpu", "cuda"), performer_pytorch),
    "linear-attention-transformer": ("linear_attention_transformer", ("cpu", "cuda"), linear_attention_transformer),
    "fla chunk elu": ("fla", ("cuda",), flash_linear_attention("chunk")),
    "fla fused_chunk elu": ("fla", ("cuda",), flash_linear_attention("fused_chunk")),
}
"""The package each needs, the devices it has something for, and how it is made."""


def available(device: torch.device, only: list[str]) -> dict[str, Contestant]:
    """All that can run here of those asked for, and a line about each that cannot."""
    found = {}
    for name, (package, devices, make) in PROJECTS.items():
        if name not in only:
            continue
        if device.type not in devices:
            print(f"{name}: left out, it has nothing for a {device.type}")
        elif package and not find_spec(package):
            print(f"{name}: left out, {package} is not installed")
        else:
            torch.manual_seed(0)
            try:
                found[name] = make()
            except ImportError as failure:
                print(f"{name}: left out, {package} cannot be imported: {failure}")
    return found


def error(candidate: Contestant, device: torch.device) -> float:
    """How far its outputs are from the definition in float64, by norm."""
    q, k, v = inputs(CHECKED, device)[:3]
    with torch.no_grad():
        found = candidate.attend(q, k, v).double()
        truth = candidate.definition(q.double(), k.double(), v.double())
    return float((found - truth).norm() / truth.norm())


def leak(candidate: Contestant, device: torch.device) -> float:
    """How far the first output moves when the last key is another: not at all, if the future is hidden."""
    q, k, v = inputs(CHECKED, device)[:3]
    other = torch.cat([k[:, :, :-1], 5 * k[:, :, -1:]], dim=2)
    with torch.no_grad():
        return float((candidate.attend(q, other, v)[:, :, 0] - candidate.attend(q, k, v)[:, :, 0]).abs().max())


def inputs(length: int, device: torch.device) -> list[Tensor]:
    """Queries, keys, values, and the gradient of the outputs."""
    draw = torch.Generator().manual_seed(length)
    return [torch.randn(ROWS, HEADS, length, WIDTH, generator=draw).to(device) for _ in range(4)]


def both_passes(attend: Attention, length: int, device: torch.device) -> Callable[[], object]:
    *given, slope = inputs(length, device)
    q, k, v = (x.requires_grad_() for x in given)
    return lambda: torch.autograd.grad(attend(q, k, v), (q, k, v), slope)


def best_possible(features: int, length: int, product_speed: float, copy_speed: float) -> float:
    """Seconds of the chunked form's operations or bytes, whichever take longer, forward and backward; the shorter its
    chunks, the fewer the operations, and 16 tokens still fill the widest vectors."""
    within, state = 2 * CHUNK_SIZE * (features + WIDTH), 4 * features * WIDTH  # a token's: in its chunk, to and from S
    operations = 3.5 * ROWS * HEADS * length * (within + state)  # the backward pass is that of 5 products for 2
    numbers = 4 * ROWS * HEADS * length * WIDTH * 2  # queries, keys, values, outputs, and their gradients
    return max(operations / product_speed, 4 * numbers / copy_speed)


def speeds_of_the_machine(device: torch.device) -> tuple[float, float]:
    """Operations per second of a large product, and bytes per second of a copy, in float32."""
    a, b = torch.randn(2048, 2048, device=device), torch.randn(64_000_000, device=device)
    product = min(time_once(lambda: a @ a, device) for _ in range(5))
    into = torch.empty_like(b)
    copy = min(time_once(lambda: into.copy_(b), device) for _ in range(5))
    return 2 * 2048**3 / product, 2 * b.nbytes / copy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=parse_lengths, default=parse_lengths("1k,4k"))
    parser.add_argument("--only", nargs="+", choices=PROJECTS, default=list(PROJECTS), metavar="PROJECT")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of one pass; what takes longer is left out")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    candidates = available(device, options.only)
    errors = {name: error(one, device) for name, one in candidates.items()}
    for name, off in errors.items():
        verdict = "agrees with its definition" if off < AGREES else "DOES NOT agree with its definition"
        moved = leak(candidates[name], device)
        hidden = f", and its first output MOVES by {moved:.0e} with the last key" if moved else ""
        print(f"{name}: {verdict}, off by {off:.0e}{hidden}")
    product, copy = speeds_of_the_machine(device)
    print(f"\n{describe_machine(device)}: {product / 1e9:,.0f} GFLOP/s, {copy / 1e9:,.0f} GB/s")
    print(f"float32, {ROWS} row, {HEADS} heads of width {WIDTH}, forward and backward\n")
    print("| tokens | project | ms | times as fast as torch softmax | of the best possible |\n|---|---|---|---|---|")
    slow: set[str] = set()
    for length in options.lengths:
        passes = {}
        for name, one in candidates.items():
            if name in slow:
                continue
            passes[name] = both_passes(one.attend, length, device)
            begun = time.perf_counter()
            passes[name]()
            if 4 * (time.perf_counter() - begun) > options.limit:
                slow.add(name)
        seconds = {name: statistics.median(rounds) for name, rounds in time_rounds(passes, device).items()}
        for name, one in candidates.items():
            if name not in seconds:
                continue
            ratio = f"{seconds['torch softmax'] / seconds[name]:.2f}" if "torch softmax" in seconds else "-"
            share = "-"
            if one.features:
                share = f"{best_possible(one.features, length, product, copy) / seconds[name]:.0%}"
            mark = "" if errors[name] < AGREES else " (does not agree)"
            cells = [name_length(length), name + mark, f"{seconds[name] * 1e3:,.1f}", ratio, share]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
