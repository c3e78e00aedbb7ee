#!/usr/bin/env python
"""An exported folder beside the run it was made of: the same greedy texts, where lmlong is not installed.

    python tools/compare/exported.py write quickstart expected.npz
    python tools/compare/exported.py check quickstart-hf expected.npz
    python tools/compare/exported.py check quickstart-onnx expected.npz --by onnxruntime

`write` runs lmlong. It cuts prompts of 1 to 300 tokens at random out of the held-out text of a run, or draws their
tokens where that text is not there, and writes them to a file with the run's greedy continuation of each in float32,
the gap between its two best logits at each step, and the logits after some of the prompts.

`check` needs that file and what runs the folder, never lmlong, which it keeps from being imported. It continues all
prompts in batches that are padded on the left, and some, which are as long as any, also alone and as one batch. Texts
that part where the two best logits are within 1e-4 are counted by themselves, as rounding decides there. The exit
status is 1 where any other text differs, or logits by more than rounding.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

LONGEST, ROWS = 300, 10
"""Tokens of the longest prompts, and how many prompts have the same length."""
WITH_LOGITS, ALONE = 100, 20
"""Prompts whose logits are kept, and among them those that are continued alone too, spread evenly over the lengths."""
BATCH = 50
TIE = 1e-4
AGREES = 1e-4
"""The largest difference of logits, relative to the largest of them."""


class Expected(NamedTuple):
    """What a run makes of prompts, in order of their lengths."""

    prompts: np.ndarray  # (tokens,) one after the other
    sizes: np.ndarray  # (prompts,)
    texts: np.ndarray  # (prompts, steps) the greedy continuations
    gaps: np.ndarray  # (prompts, steps) between the two best logits
    logits: np.ndarray  # (prompts with logits, vocabulary) after the prompt

    @property
    def rows(self) -> list[list[int]]:
        return [row.tolist() for row in np.split(self.prompts, self.sizes.cumsum()[:-1])]

    @property
    def with_logits(self) -> np.ndarray:
        """The prompts whose logits are kept."""
        return spread(len(self.sizes), len(self.logits))


def spread(count: int, wanted: int) -> np.ndarray:
    """Numbers below `count`, as many as wanted and evenly spread, the first and the last among them."""
    return np.linspace(0, count - 1, min(count, wanted)).round().astype(int)


def write(run: str, prompts: int, steps: int, seed: int) -> Expected:
    """What a run makes of prompts drawn by a seed."""
    import lmlong
    from lmlong.evaluation.perplexity import validation_text

    loaded = lmlong.load(run, "cpu")
    draw = np.random.default_rng(seed)
    try:
        text = validation_text(loaded).tokens
        print("prompts from the held-out text of the run")
    except lmlong.LmlongError as error:
        text = draw.integers(0, loaded.tokenizer.vocabulary, 100 * LONGEST)
        print(f"prompts of random tokens, as the text of the run is not there: {error}")
    longest = min(LONGEST, len(text))
    lengths = np.sort(draw.integers(1, longest + 1, -(-prompts // ROWS)))
    lengths[0], lengths[-1] = 1, longest
    rows: list[list[int]] = []
    parts = []
    for size in lengths:
        begins = draw.integers(0, len(text) - size + 1, min(ROWS, prompts - len(rows)))
        group = [[loaded.tokenizer.bos, *text[begin : begin + size - 1].tolist()] for begin in begins]
        rows += group
        parts.append(continued(loaded.model, torch.tensor(group), steps))
    texts, gaps, logits = (np.concatenate(part) for part in zip(*parts, strict=True))
    sizes = np.array([len(row) for row in rows])
    return Expected(np.concatenate(rows), sizes, texts, gaps, logits[spread(len(rows), WITH_LOGITS)])


@torch.inference_mode()
def continued(model: Any, ids: Tensor, steps: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The greedy continuation of prompts of one length, the gaps, and the logits after the prompts."""
    hidden, state = model.hidden_states(ids)
    logits = first = model.logits(hidden[:, -1])
    texts: list[Tensor] = []
    gaps = []
    for step in range(steps):
        if step:
            logits, state = model.step(texts[-1], state)
        best = logits.topk(2).values
        gaps.append(best[:, 0] - best[:, 1])
        texts.append(logits.argmax(-1))
    return torch.stack(texts, 1).numpy(), torch.stack(gaps, 1).numpy(), first.numpy()


class Backend(Protocol):
    """What runs an exported folder."""

    name: str

    def greedy(self, rows: Sequence[list[int]], steps: int) -> tuple[np.ndarray, np.ndarray]:
        """The greedy continuations (B, steps) of prompts read as one batch, which no token ends, and the logits (B, V)
        after the prompts."""


class Transformers:
    def __init__(self, folder: Path):
        from transformers import AutoModelForCausalLM

        self.name = f"transformers {version('transformers')}"
        self.model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
        self.model.generation_config.eos_token_id = None

    def greedy(self, rows: Sequence[list[int]], steps: int) -> tuple[np.ndarray, np.ndarray]:
        ids, mask = left_padded(rows)
        told = self.model.generate(
            torch.from_numpy(ids),
            attention_mask=torch.from_numpy(mask),
            max_new_tokens=steps,
            do_sample=False,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        return told.sequences[:, -steps:].numpy(), told.logits[0].numpy()


class Onnxruntime:
    """A graph has no padding: prompts of one length are read together, and then rows wherever they are."""

    def __init__(self, folder: Path):
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        self.name = f"onnxruntime {version('onnxruntime')}"
        self.session = onnxruntime.InferenceSession(folder / "model.onnx", options)
        self.parts = json.loads((folder / "config.json").read_text())["state"]
        self.wrap = onnxruntime.OrtValue.ortvalue_from_numpy

    def greedy(self, rows: Sequence[list[int]], steps: int) -> tuple[np.ndarray, np.ndarray]:
        order = sorted(range(len(rows)), key=lambda row: len(rows[row]))
        found = [self._continued(np.array([rows[row] for row in group]), steps) for group in self._alike(rows, order)]
        texts, logits = (np.concatenate(part)[np.argsort(order)] for part in zip(*found, strict=True))
        return texts, logits

    @staticmethod
    def _alike(rows: Sequence[list[int]], order: Sequence[int]) -> Iterator[list[int]]:
        for _, group in groupby(order, key=lambda row: len(rows[row])):
            yield list(group)

    def _continued(self, ids: np.ndarray, steps: int) -> tuple[np.ndarray, np.ndarray]:
        """The continuations and first logits of prompts (B, T) of one length."""
        state = [self.wrap(np.zeros([len(ids), *part["shape"]], part["dtype"])) for part in self.parts]
        logits, texts = [], []
        for _ in range(steps):
            found, state = self._read(ids, state)
            logits.append(found)
            ids = found.argmax(-1)[:, None]
            texts.append(ids)
        return np.concatenate(texts, axis=1), logits[0]

    def _read(self, ids: np.ndarray, state: Sequence[Any]) -> tuple[np.ndarray, list[Any]]:
        """The logits (B, V) after more tokens, and the state, whose large tables stay in their place."""
        binding = self.session.io_binding()
        binding.bind_cpu_input("ids", ids)
        binding.bind_output("logits")
        for part, past in zip(self.parts, state, strict=True):
            binding.bind_ortvalue_input(part["input"], past)
            if part["in_place"]:
                binding.bind_ortvalue_output(part["output"], past)
            else:
                binding.bind_output(part["output"])
        self.session.run_with_iobinding(binding)
        logits, *after = binding.get_outputs()
        # an output in place borrows its memory of the past, which must therefore stay
        kept = [past if part["in_place"] else new for part, past, new in zip(self.parts, state, after, strict=True)]
        return logits.numpy()[:, -1].copy(), kept


BACKENDS: dict[str, Callable[[Path], Backend]] = {"transformers": Transformers, "onnxruntime": Onnxruntime}


def left_padded(rows: Sequence[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Rows of any lengths as ids and mask (B, T)."""
    longest = max(map(len, rows))
    ids = np.array([[0] * (longest - len(row)) + row for row in rows])
    return ids, np.array([[0] * (longest - len(row)) + [1] * len(row) for row in rows])


class Counts(NamedTuple):
    """How many texts are equal, part where the two best logits tie, or differ otherwise."""

    equal: int
    ties: int
    others: int


def count(found: np.ndarray, expected: np.ndarray, gaps: np.ndarray) -> Counts:
    differs = found != expected
    equal = ~differs.any(1)
    tied = gaps[np.arange(len(gaps)), differs.argmax(1)] < TIE
    return Counts(int(equal.sum()), int((tied & ~equal).sum()), int((~tied & ~equal).sum()))


def apart(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference, relative to the largest number; infinite where any is not a number."""
    difference = float(np.abs(found - expected).max() / np.abs(expected).max())
    return difference if np.isfinite(difference) else np.inf


def check(backend: Backend, expected: Expected) -> bool:
    """Print how the folder compares with the run, and return whether it is the same model."""
    rows, steps = expected.rows, expected.texts.shape[1]
    texts, logits = (np.concatenate(part) for part in zip(*in_batches(backend, rows, steps), strict=True))
    batches = count(texts, expected.texts, expected.gaps)
    kept = expected.with_logits
    off = apart(logits[kept], expected.logits)

    few = kept[spread(len(kept), ALONE)]
    by_itself = [backend.greedy([rows[number]], steps) for number in few]
    texts, alone = (np.concatenate(part) for part in zip(*by_itself, strict=True))
    singles = count(texts, expected.texts[few], expected.gaps[few])
    of_all_lengths, padded = backend.greedy([rows[number] for number in few], steps)
    mixed = count(of_all_lengths, expected.texts[few], expected.gaps[few])
    moved = apart(padded, alone)

    print(f"{'prompts of ' + backend.name:30} {'all':>8} {'alone':>8} {'mixed':>8}")
    for name in Counts._fields:
        told = " ".join(f"{getattr(counts, name):8,}" for counts in (batches, singles, mixed))
        print(f"{LABELS[name]:30} {told}")
    print(f"largest difference of logits, relative to the largest: {off:.1e} after {len(kept):,} prompts")
    print(f"padded against alone: {moved:.1e} after {len(few):,} prompts of {len(rows[0])} to {len(rows[-1])} tokens")
    return not (batches.others or singles.others or mixed.others) and max(off, moved) < AGREES


LABELS = {"equal": "equal", "ties": f"parting at a gap below {TIE:.0e}", "others": "other differences"}


def in_batches(backend: Backend, rows: list[list[int]], steps: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for begin in range(0, len(rows), BATCH):
        yield backend.greedy(rows[begin : begin + BATCH], steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    halves = parser.add_subparsers(dest="half", required=True)
    writing = halves.add_parser("write", help="write what a run makes of prompts")
    writing.add_argument("run", metavar="RUN")
    writing.add_argument("file", metavar="FILE", type=Path)
    writing.add_argument("--prompts", type=int, default=1000)
    writing.add_argument("--tokens", type=int, default=24, help="tokens of each continuation")
    writing.add_argument("--seed", type=int, default=0)
    checking = halves.add_parser("check", help="compare an exported folder with that")
    checking.add_argument("folder", metavar="FOLDER", type=Path)
    checking.add_argument("file", metavar="FILE", type=Path)
    checking.add_argument("--by", choices=BACKENDS, default="transformers")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.half == "write":
        written = write(options.run, options.prompts, options.tokens, options.seed)
        with options.file.open("wb") as file:
            np.savez(file, **written._asdict())
        near = int((written.gaps < TIE).any(1).sum())
        print(f"{options.file}: {len(written.sizes):,} prompts, {near:,} with two logits within {TIE:.0e} on their way")
        return
    there = find_spec("lmlong") is not None
    print("lmlong: installed here, and kept from being imported" if there else "lmlong: not installed here")
    sys.modules["lmlong"] = None  # type: ignore[assignment]
    with np.load(options.file) as held:
        expected = Expected(**held)
    sys.exit(not check(BACKENDS[options.by](options.folder), expected))


if __name__ == "__main__":
    main()
