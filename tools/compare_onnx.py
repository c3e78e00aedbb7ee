"""A run in onnxruntime beside lmlong: its logits, its speed, and its memory over a long text.

    lmlong export RUN --to onnx --out FOLDER
    python tools/compare_onnx.py RUN FOLDER --long 100000

Both compute in float32, one text, one thread. Rounds of both take turns, and the time is that of the processor, so that
other programs on it count for little. Reading is in pieces of 256 tokens.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compare_decode import WARM, Write, native, ours_at

import lmlong
from lmlong.inference.session import prefill
from lmlong.model.language_model import LanguageModel

PIECE = 256
TEXT = 1024
"""Tokens that are read before any are written."""
EARLY = 1000
"""Tokens after which memory is measured first."""


class Onnx:
    """An exported folder and its state; those of its parts that may be are written in place."""

    def __init__(self, folder: Path):
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(folder / "model.onnx", options)
        self.parts: list[dict[str, Any]] = json.loads((folder / "config.json").read_text())["state"]
        self.wrap: Callable[[np.ndarray], Any] = onnxruntime.OrtValue.ortvalue_from_numpy
        self.begin()

    def begin(self) -> None:
        self.state = {part["input"]: np.zeros([1, *part["shape"]], part["dtype"]) for part in self.parts}
        self.logits = np.zeros([1, 1, 1], np.float32)

    def read(self, ids: np.ndarray) -> None:
        binding = self.session.io_binding()
        binding.bind_cpu_input("ids", ids)
        binding.bind_output("logits")
        for part in self.parts:
            past = self.wrap(self.state[part["input"]])
            binding.bind_ortvalue_input(part["input"], past)
            if part["in_place"]:
                binding.bind_ortvalue_output(part["output"], past)
            else:
                binding.bind_output(part["output"])
        self.session.run_with_iobinding(binding)
        self.logits, *after = (value.numpy() for value in binding.get_outputs())
        kept = {part["input"]: self.state[part["input"]] for part in self.parts if part["in_place"]}
        self.state = dict(zip(self.state, after, strict=True)) | kept

    def write(self) -> None:
        self.read(self.logits[:, -1:].argmax(-1))


def pieces(ids: np.ndarray) -> list[np.ndarray]:
    return [ids[:, begin : begin + PIECE] for begin in range(0, ids.shape[1], PIECE)]


def difference(model: LanguageModel, onnx: Onnx, ids: np.ndarray) -> float:
    """The largest difference of logits over a text, relative to the largest logit."""
    expected, found = model(torch.from_numpy(ids))[0].numpy(), []
    onnx.begin()
    for piece in pieces(ids):
        onnx.read(piece)
        found.append(onnx.logits)
    return float(np.abs(np.concatenate(found, axis=1) - expected).max() / np.abs(expected).max())


def seconds(writers: dict[str, Write], tokens: int, rounds: int) -> dict[str, float]:
    """Median seconds of the processor for a token of each, its rounds in turn with those of the others."""
    taken: dict[str, list[float]] = {name: [] for name in writers}
    for number in range(rounds + 1):
        for name, write in writers.items():
            for _ in range(WARM):
                write()
            begun = time.process_time()
            for _ in range(tokens):
                write()
            if number:  # the first round warms up
                taken[name].append((time.process_time() - begun) / tokens)
    return {name: statistics.median(times) for name, times in taken.items()}


def writing(model: LanguageModel, onnx: Onnx, ids: np.ndarray, tokens: int, rounds: int) -> dict[str, float]:
    """Tokens per second of writing, after a text."""
    session, fast = prefill(model, [ids[0].tolist()]), native(model)
    writers = {"torch": ours_at(model, session), "native": ours_at(fast, session), "onnxruntime": onnx.write}
    return {name: 1 / taken for name, taken in seconds(writers, tokens, rounds).items()}


def reading(model: LanguageModel, onnx: Onnx, ids: np.ndarray, rounds: int) -> dict[str, float]:
    """Tokens per second of reading, the median of the rounds."""
    taken: dict[str, list[float]] = {"lmlong": [], "onnxruntime": []}
    for _ in range(rounds + 1):
        onnx.begin()
        state, begun = None, time.process_time()
        for piece in pieces(ids):
            _, state = model(torch.from_numpy(piece), state)
        middle = time.process_time()
        for piece in pieces(ids):
            onnx.read(piece)
        taken["lmlong"].append(middle - begun)
        taken["onnxruntime"].append(time.process_time() - middle)
    return {name: ids.shape[1] / statistics.median(times) for name, times in taken.items()}


def resident() -> float:
    """MiB of memory that this process has."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def write_long(onnx: Onnx, tokens: int) -> None:
    onnx.begin()
    onnx.read(np.array([[1]]))
    begun = time.perf_counter()
    for number in range(1, tokens + 1):
        onnx.write()
        if number in (EARLY, tokens):
            taken = time.perf_counter() - begun
            print(f"after {number:,} tokens, {taken:,.0f} s: {resident():,.1f} MiB", flush=True)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=32, help="written in each round")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--long", type=int, default=0, help="tokens of a long text, of which memory is measured")
    options = parser.parse_args()
    torch.set_num_threads(1)
    onnx = Onnx(options.folder)
    if options.long:  # before lmlong takes memory
        write_long(onnx, options.long)
    model = lmlong.load(options.run, device="cpu").model
    vocabulary = model.embedding.num_embeddings
    ids = torch.randint(vocabulary, (1, TEXT), generator=torch.Generator().manual_seed(1)).numpy()
    print(f"logits differ by {difference(model, onnx, ids):.1e} of the largest")
    for what, speed in (
        ("read", reading(model, onnx, ids, options.rounds)),
        ("write", writing(model, onnx, ids, options.tokens, options.rounds)),
    ):
        print(f"{what}, tokens/s: " + ", ".join(f"{name} {value:,.0f}" for name, value in speed.items()))


if __name__ == "__main__":
    main()
