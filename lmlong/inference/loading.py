"""A trained model, taken from its run and ready to read and write."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch

from lmlong.checkpoint import manifest
from lmlong.checkpoint.manifest import WEIGHTS
from lmlong.checkpoint.read import check_size, load_weights, read_recipe, read_tokenizer, reading
from lmlong.errors import UsageError
from lmlong.inference import memory as memories
from lmlong.inference import state_file
from lmlong.inference.memory import Memory
from lmlong.inference.sampling import Sampler, Sampling
from lmlong.inference.streaming import Writing
from lmlong.model.build import build
from lmlong.model.compiled import compile_step, obstacle
from lmlong.model.device import pick_device
from lmlong.model.language_model import LanguageModel
from lmlong.model.text_model import TextModel
from lmlong.recipe import Recipe
from lmlong.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Trained:
    """A trained model of any objective with all that belongs to it."""

    model: TextModel
    tokenizer: Tokenizer
    recipe: Recipe
    checkpoint: Path
    step: int | None = None
    """The optimizer steps behind the weights."""
    weights_hash: str = ""
    """The sha256 of the file of weights."""

    @property
    def device(self) -> torch.device:
        return self.model.embedding.weight.device


@dataclass(frozen=True)
class Loaded(Trained):
    """A trained language model, ready to read and write."""

    model: LanguageModel

    def stream(
        self,
        prompt: str | Iterable[str] = "",
        *,
        state: Memory | None = None,
        max_tokens: int | None = 200,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        repetition_window: int = 256,
        seed: int = 0,
        stop: Sequence[str] = (),
    ) -> Iterator[str]:
        """Continue a prompt, piece by piece as the text is written, without the prompt itself.

        >>> model = lmlong.load("runs/quickstart")
        >>> for piece in model.stream("def ", max_tokens=100):
        ...     print(piece, end="", flush=True)

        With a `state`, the prompt goes on from what was read before. The text ends where the model ends the document,
        after `max_tokens` tokens (None: never), or before a `stop` string. The other options are those of `Sampling`;
        the same seed gives the same text.
        """
        options = Sampling(temperature, top_k, top_p, min_p, repetition_penalty, repetition_window, seed)
        self._check(max_tokens, stop)
        return self._stream(prompt, state, options, max_tokens, stop)

    def _stream(self, prompt: str | Iterable[str], state: Memory | None, options: Sampling, *end: Any) -> Iterator[str]:
        for _, piece in self.write(self.read(prompt, state), options, [(0,)], *end):
            yield piece

    def write(
        self,
        memory: Memory,
        options: Sampling,
        rows: Sequence[tuple[int, ...]],
        max_tokens: int | None = 200,
        stop: Sequence[str] = (),
        keep: bool = False,
    ) -> Writing:
        """Continue all rows of a memory at once: iterate over it for (row, piece of text). `rows` are the numbers that
        each row's draws follow from beside the seed; with `keep`, tokens and their log-probabilities are kept."""
        self._check(max_tokens, stop)
        return Writing(self.model, self.tokenizer, memory, Sampler(options, rows), max_tokens, stop, keep)

    def read(self, text: str | Iterable[str], state: Memory | None = None) -> Memory:
        """Read a text of any length, whole or in pieces: the state after it, begun anew or going on from another.

        >>> book = model.read(open("book.txt").read())
        >>> "".join(model.stream("She said: ", state=book))
        """
        tokens = (part.tolist() for part in self.tokenizer.encode_pieces([text] if isinstance(text, str) else text))
        return memories.read(self.model, chain([] if state else [[self.tokenizer.bos]], tokens), state)

    def compile(self) -> None:
        """Write single texts several times as fast: on a CPU by native code, which a machine compiles once, on a GPU by
        a CUDA graph, which takes torch.compile some seconds to make."""
        if why := obstacle(self.model):
            raise UsageError(f"compile: {why}")
        compile_step(self.model)

    @property
    def compiles_at_once(self) -> bool:
        """Whether there is nothing to wait for in a compiled step, but for the first one on a machine."""
        return self.device.type == "cpu" and obstacle(self.model) is None

    def save_state(self, state: Memory, path: str | Path) -> None:
        """Write a state to a file, for this model to go on with."""
        state_file.save(Path(path), state, self._owners, self.tokenizer, str(self.checkpoint))

    def load_state(self, path: str | Path) -> Memory:
        """A state from a file that this model wrote."""
        return state_file.load(Path(path), self.model, self._owners, str(self.checkpoint))

    @staticmethod
    def _check(max_tokens: int | None, stop: Sequence[str]) -> None:
        if max_tokens is not None and max_tokens < 0:
            raise UsageError(f"max_tokens: {max_tokens} is negative. Give a number of tokens, or None for no end.")
        if "" in stop or isinstance(stop, str):
            raise UsageError(f"stop: {stop!r} is no list of strings that are not empty. Name the strings to stop at.")

    @cached_property
    def _owners(self) -> dict[str, str]:
        return state_file.owners(self.model, self.tokenizer, self.weights_hash)


Weights = Literal["32", "bf16", "int8"]
"""How the matrices of a model are kept."""


def open_run(run: str | Path, device: str = "auto") -> Trained:
    """The model of a run, whatever it was trained for."""
    place = pick_device(device)
    trained = reading(run, _read)
    trained.model.to(place).eval()
    return trained


def _read(checkpoint: Path) -> Trained:
    recipe, tokenizer = read_recipe(checkpoint), read_tokenizer(checkpoint)
    check_size(checkpoint, recipe, lambda recipe: build(recipe, tokenizer.vocabulary))
    model = build(recipe, tokenizer.vocabulary)
    load_weights(model, checkpoint)
    says = manifest.read(checkpoint)
    return Trained(model, tokenizer, recipe, checkpoint, says.step, says.files[WEIGHTS]["sha256"])


def load(run: str | Path, device: str = "auto", weights: Weights = "32", sums: Literal["32", "64"] = "32") -> Loaded:
    """The language model of a run: its folder, its name under runs/, or a checkpoint; `device` is auto, cpu or cuda.

    `weights` says how its matrices are kept: "bf16" takes half the memory, and changes what it predicts a little,
    "int8" a quarter, and changes it more; `sums` how S and z are: "64" for texts of more than some ten million tokens.
    """
    trained = open_run(run, device)
    model = trained.model
    if not isinstance(model, LanguageModel):
        raise UsageError(
            f"{run}: an encoder (objective: masked) has read the future of each token, so it has nothing to continue "
            "and no state. Measure it by lmlong eval; for this, train a model with objective: causal."
        )
    if sums == "64":
        model.sum_in(torch.float64)
    if weights != "32":
        model.round_matrices({"bf16": torch.bfloat16, "int8": torch.int8}[weights])
    return Loaded(**{**vars(trained), "model": model})
