"""The speed of linear attention by the Triton kernels, beside flash attention and flash-linear-attention."""

import copy
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from gpu_report_parts import attentions
from gpu_report_parts.attentions import Attend, Text
from gpu_report_parts.check import against_definition
from gpu_report_parts.part import ATTENTIONS, Job, figures, lines, measure
from lmlong.attention import laws
from lmlong.bench.speed import Candidate, Result

OF_FLA = ("elu", "elu-learned")
"""What flash-linear-attention has too."""

BY_TORCH = "elu-learned"
"""The recipes' own attention, which is measured by torch's operations too."""

AGREES = 3e-2
"""How far bfloat16 numbers may be from those of torch's operations, or flash-linear-attention's from the definition."""

COMPARED = 1024
"""Tokens at either end that are compared: the outputs of the last and the gradients of the first hang on all others."""

INTRODUCTION = """\
Calls from Python, the launch of their kernels included, in bfloat16; medians of rounds in which all have their turn. MB
are those held at one time, inputs included. Linear attentions are read by the Triton kernels, and only where their
numbers are right at that length; "by torch" is the same by torch's operations, "by fla" by flash-linear-attention with
the same features, which where it decays leaves out the denominator. softmax is {}."""


class Group(NamedTuple):
    """What is measured together."""

    head_dim: int
    grads: bool

    @property
    def title(self) -> str:
        return f"head_dim {self.head_dim}, {'forward and backward' if self.grads else 'forward'}"


class WrongError(Exception):
    """Numbers are wrong, so that their speed would mean nothing."""


def kernels(job: Job) -> None:
    """Measure every attention at every length, forward alone and with the backward pass."""
    if why := no_fla(job):
        job.found.left_out.append(f"flash-linear-attention: {why}")
    groups = [Group(head_dim, grads) for head_dim in job.sizes.head_dims for grads in (False, True)]
    results: dict[Group, list[Result]] = {group: [] for group in groups}
    for length in job.sizes.lengths:
        for group, known in results.items():
            if makers := job.attempt(f"{group.title}, {length:,} tokens", partial(candidates, job, length, group)):
                known += measure(job, group.title, length, makers, known)
            job.found.lines = page(job, results)
            job.found.figures = {of.title: figures(found) for of, found in results.items()}
            job.found.save()


def page(job: Job, results: dict[Group, list[Result]]) -> list[str]:
    on_gpu = job.device.type == "cuda"
    told = [INTRODUCTION.format("torch's flash attention" if on_gpu else "what torch has for a CPU")]
    for group, found in results.items():
        from_on = figures(found)["faster_from"].items()
        told += ["", f"### {group.title}, {job.sizes.width // group.head_dim} heads", "", *lines(found), ""]
        faster = ", ".join(f"{name} {length}" for name, length in from_on if length)
        told += [f"Tokens from which on each is faster than softmax: {faster or 'not known'}."]
    return told


def candidates(job: Job, length: int, group: Group) -> dict[str, Callable[[], Candidate]]:
    """Return how each attention is made ready; all share their queries, keys and values."""
    heads, rows = job.sizes.width // group.head_dim, max(1, job.sizes.tokens // length)
    x = attentions.draw((rows, heads, length, group.head_dim), torch.bfloat16, job.device)

    def by(kernel: str, name: str) -> Candidate:
        attention = attentions.build(name, heads, group.head_dim, job.device, kernel)
        attend = partial(attentions.forward, attention)
        return candidate(attend, attentions.supplied(attention, x), group.grads)

    def ours(name: str) -> Candidate:
        if wrong := against_definition(name, group.head_dim, "bf16", job)["wrong"]:
            raise WrongError(wrong[0])
        one = by("triton", name)
        compare(one, by("torch", name), group.grads)
        return one

    def by_fla(name: str) -> Candidate:
        check_fla(job, name, group.head_dim)
        attention = attentions.build(name, heads, group.head_dim, job.device, "torch")
        attend = partial(attentions.fla, attention)
        return candidate(attend, attentions.supplied(attention, x), group.grads)

    return {
        "softmax": lambda: candidate(attentions.flash, x, group.grads, growth=2),
        **{name: partial(ours, name) for name in ATTENTIONS},
        f"{BY_TORCH} by torch": partial(by, "torch", BY_TORCH),
        **{f"{name} by fla": partial(by_fla, name) for name in OF_FLA if not no_fla(job)},
    }


def candidate(attend: Attend, x: Text, grads: bool, growth: int = 1) -> Candidate:
    """Return an attention on its inputs as a pass that returns its outputs, or the gradients of the inputs."""
    inputs = list(x.leaves.values())
    dy = torch.empty_like(x.v).normal_(generator=torch.Generator(x.v.device).manual_seed(1))
    held = sum(t.nbytes for t in inputs) + (dy.nbytes if grads else 0)

    def work() -> tuple[Tensor, ...]:
        if grads:
            return torch.autograd.grad(attend(x), inputs, dy)
        with torch.no_grad():
            return (attend(x),)

    tokens = x.v.shape[0] * x.v.shape[2]
    return Candidate(work, tokens, held, held + x.v.nbytes, growth)


def compare(one: Candidate, other: Candidate, grads: bool) -> None:
    """Refuse a pass whose numbers are not those of another one."""

    def ends(t: Tensor) -> Tensor:
        return torch.cat([t[:, :, :COMPARED], t[:, :, -COMPARED:]], dim=2)

    # not those of gates: sums of terms that mostly cancel, of which rounding leaves less the longer the text is
    for name, mine, usual in zip(("dq", "dk", "dv") if grads else ("y",), one.call(), other.call(), strict=False):
        if not (off := laws.error(ends(mine), ends(usual))) <= AGREES:
            raise WrongError(f"{name} is {off:.1e} from that by torch's operations")


def no_fla(job: Job) -> str | None:
    if not find_spec("fla"):
        return "not installed"
    return "it has nothing for a CPU" if job.device.type == "cpu" else None


def check_fla(job: Job, name: str, head_dim: int) -> None:
    """Refuse flash-linear-attention where its outputs are not those of the definition."""
    attention = attentions.build(name, 2, head_dim, job.device, "torch")
    x = attentions.supplied(attention, attentions.draw((2, 2, job.sizes.checked, head_dim), torch.bfloat16, job.device))
    truth = attentions.definition(copy.deepcopy(attention).double(), x.map(Tensor.double))
    # with values of 1 an output is its denominator
    y, denominators = attentions.fla(attention, x), attentions.fla(attention, x._replace(v=torch.ones_like(x.v)))
    if not (off := laws.error(y / denominators, truth)) <= AGREES:
        raise WrongError(f"its outputs are {off:.1e} from the definition")
