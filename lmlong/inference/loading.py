"""Trained models, loaded from their runs."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lmlong.checkpoint import manifest
from lmlong.checkpoint.manifest import WEIGHTS
from lmlong.checkpoint.owners import owners
from lmlong.checkpoint.read import read_model, reading, trained_tokens
from lmlong.decode.choice import describe_engine, fast_engine, why_no_fast_engine
from lmlong.decode.engine import EagerEngine
from lmlong.errors import UsageError
from lmlong.inference import hidden_states, state_file
from lmlong.inference.chat import Conversation
from lmlong.inference.classify import TrainedClassifier
from lmlong.inference.drafts import Drafts
from lmlong.inference.generation import Generation, check_end
from lmlong.inference.hidden_states import HiddenStates
from lmlong.inference.session import Session, begin_learning, prefill
from lmlong.inference.trained_model import TrainedModel
from lmlong.inference.unread import Encoding, UnreadText
from lmlong.model.base import quantize
from lmlong.model.device import WITHOUT_FLOAT64, Precision, autocast, pick_device
from lmlong.model.language_model import CACHE_DTYPE, LanguageModel
from lmlong.model.quantization import Weights
from lmlong.model.sampling_options import DEFAULTS, MAX_TOKENS, Sampling
from lmlong.model.state import at_least_float32


@dataclass(frozen=True, repr=False)
class TrainedLanguageModel(TrainedModel):
    """A trained language model."""

    model: LanguageModel
    learn: bool = False
    """Whether the output layer learns from each text that is read."""

    def stream(
        self,
        prompt: str | Iterable[str] = "",
        *,
        state: Session | None = None,
        max_tokens: int | None = MAX_TOKENS,
        temperature: float = DEFAULTS.temperature,
        top_k: int | None = DEFAULTS.top_k,
        top_p: float = DEFAULTS.top_p,
        min_p: float = DEFAULTS.min_p,
        repetition_penalty: float = DEFAULTS.repetition_penalty,
        repetition_window: int = DEFAULTS.repetition_window,
        loop_penalty: float | None = DEFAULTS.loop_penalty,
        ignore_eos: bool = DEFAULTS.ignore_eos,
        seed: int = DEFAULTS.seed,
        stop: Sequence[str] = (),
        heal: bool = True,
        drafts: bool = True,
    ) -> Iterator[str]:
        """Continue a prompt, piece by piece as the text is written, without the prompt itself.

        >>> model = lmlong.load("runs/quickstart")
        >>> for piece in model.stream("def ", max_tokens=100):
        ...     print(piece, end="", flush=True)

        With a `state`, the prompt continues the text that the state has read. The text ends when the model ends the
        document (never with `ignore_eos`), after `max_tokens` tokens (None: never), or before a `stop` string. `heal`
        works as in `read`; the other options are those of `lmlong.model.sampling_options.Sampling`. The same seed gives
        the same text. `drafts` may make it come faster, and change nothing else.
        """
        options = Sampling(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            repetition_window=repetition_window,
            loop_penalty=loop_penalty,
            ignore_eos=ignore_eos,
            seed=seed,
        )
        check_end(max_tokens, stop)
        return self._stream(prompt, state, heal, options, max_tokens, stop, False, drafts)

    def _stream(
        self, prompt: str | Iterable[str], state: Session | None, heal: bool, options: Sampling, *end: Any
    ) -> Iterator[str]:
        for _, piece in self.generate(self.read(prompt, state, heal=heal), options, [(0,)], *end):
            yield piece

    def generate(
        self,
        sessions: Session | Sequence[Session],
        options: Sampling,
        rows: Sequence[tuple[int, ...]],
        max_tokens: int | None = MAX_TOKENS,
        stop: Sequence[str] = (),
        keep: bool = False,
        drafts: bool = True,
    ) -> Generation:
        """Continue one or more sessions in parallel; iterate over the result for (row, piece of text).

        `rows` are numbers that seed each row's draws, together with the seed. With `keep`, tokens and their
        log-probabilities are kept. Without `drafts` each token of a single text takes a step of its own.
        """
        self.use_fast_engine(None)
        ahead = Drafts() if drafts else None
        return Generation(self.model, self.tokenizer, sessions, options, rows, max_tokens, stop, keep, ahead)

    def read(
        self,
        text: str | Iterable[str],
        state: Session | None = None,
        *,
        heal: bool = True,
        learn: bool | None = None,
        precision: Precision = "32",
    ) -> Session:
        """Read a text of any length, whole or in pieces, and return the state after it, starting from `state` if given.

        >>> book = model.read(open("book.txt").read())
        >>> "".join(model.stream("She said: ", state=book))

        The text may end anywhere, also within a word: its last tokens, which depend on what follows, stay unread until
        that is known. So the state does not depend on how a text is divided. With `heal=False` the last tokens are read
        at once.

        With `learn`, the output layer learns from this text and from all that later continues the state, after each
        token is predicted; the state holds what it learns. A state that learns already continues to. In half
        `precision` reading is faster on some devices; the state returned can be continued in any format.
        """
        encoding = Encoding(self.tokenizer, state.unread if state else UnreadText(), text, heal)
        learns = self.learns(learn)
        start = begin_learning(self.model, state._replace(unread=UnreadText()), learns) if state else None
        tokens = chain([] if state else [[self.tokenizer.bos]], encoding)
        with autocast(self.device, precision):
            session = prefill(self.model, tokens, start, learns)
        if precision != "32":
            session = session._replace(state=at_least_float32(session.state))
        return session._replace(unread=encoding.unread)

    def learns(self, learn: bool | None) -> bool:
        """Return whether a new text is learned from, given what its reader asks for; None asks for the model's way."""
        return self.learn if learn is None else learn

    def conversation(self, system: str | None = None) -> Conversation:
        """Return a conversation by the chat template of the model's tokenizer; `system` is the system message.

        `say` iterates over the pieces of an answer as they are generated.
        """
        if self.tokenizer.chat_template is None:
            raise UsageError(f"{self.checkpoint}: the tokenizer has no chat template. Use a model made for chat.")
        self.use_fast_engine(None)
        return Conversation(self.model, self.tokenizer, system, self.learn)

    def hidden_states(
        self, text: str | Iterable[str] | Tensor, state: Session | None = None, *, blocks: bool = False
    ) -> HiddenStates:
        """Return the hidden states of a text, or of ids (T,): `tokens` and `last`, with `blocks` also after each block.

        >>> hidden = model.hidden_states("She said: ", blocks=True)
        >>> embedding = hidden.last.mean(0)
        >>> [after.norm(dim=-1).mean().item() for after in hidden.blocks]

        The first row is that of bos, or with a `state` that of its last token. A text is read after the state's unread
        text; ids are read as they are. No gradients flow; call `model.model.hidden_states` for that.
        """
        return hidden_states.concat(list(self.stream_hidden_states(text, state, blocks=blocks)))

    def stream_hidden_states(
        self, text: str | Iterable[str] | Tensor, state: Session | None = None, *, blocks: bool = False
    ) -> Iterator[HiddenStates]:
        """Iterate over the hidden states in pieces, so that a text of any length takes the memory of one piece.

        >>> total = sum(piece.last.double().sum(0) for piece in model.stream_hidden_states(open("book.txt")))
        """
        if isinstance(text, Tensor):
            if text.dim() != 1 or not len(text):
                raise UsageError(f"text: ids of shape {tuple(text.shape)}. Give the ids of one text, of shape (T,).")
            start, tokens = [], iter([text.tolist()])
        else:
            unread = state.unread if state else UnreadText()
            start, tokens = [self.tokenizer.bos], iter(Encoding(self.tokenizer, unread, text, heal=False))
        before = [state.last] if state else start
        return hidden_states.stream(self.model, chain([before], tokens), state.state if state else None, blocks)

    def use_fast_engine(self, wanted: bool | None = True) -> None:
        """Decode several times faster: on a CPU by native code, which may be compiled first; on a GPU by a CUDA graph,
        recorded at the first step of each batch size. It is first compared with torch. False decodes by torch.

        With None, as when the first text is generated, an earlier choice stays; without one, native code is chosen on a
        CPU if the model has any, torch elsewhere.
        """
        chosen = self.model.engine
        if wanted is None and chosen is not None and not chosen.is_stale:
            return
        is_fast = wanted is True or (wanted is None and self.device.type == "cpu")
        if is_fast and (why := why_no_fast_engine(self.model)):
            if wanted:
                raise UsageError(f"--fast-decode: {why}")
            is_fast = False
        self.model.engine = fast_engine(self.model) if is_fast else EagerEngine(self.model)

    @property
    def decoder(self) -> str:
        """The decoder as a text: native code and how it was made, a CUDA graph, or torch, with the reason if nothing
        faster is possible."""
        self.use_fast_engine(None)
        is_torch = isinstance(self.model.engine, EagerEngine) and why_no_fast_engine(self.model) is None
        return "torch" if is_torch else describe_engine(self.model)

    def save_state(self, state: Session, path: str | Path) -> None:
        """Write a state to a file, from which this model can continue."""
        state_file.save(Path(path), state, self.model, self.owners, self.tokenizer, str(self.checkpoint))

    def load_state(self, path: str | Path, learn: bool | None = None) -> Session:
        """Return the state in a file that this model wrote; `learn` works as in `read`."""
        session = state_file.load(Path(path), self.model, self.owners, self.tokenizer, str(self.checkpoint))
        return begin_learning(self.model, session, self.learns(learn))

    @cached_property
    def owners(self) -> dict[str, str]:
        """Hashes of everything that a state depends on."""
        return owners(self.model, self.tokenizer, self.weights_hash)


StateDtype = Literal["auto", "32", "64"]
"""The format of states. auto: keys and values in `CACHE_DTYPE`, recurrent sums in float32. 32: all in float32. 64:
recurrent sums in float64, keys and values in float32."""


def open_run(run: str | Path, device: str = "auto", weights: Weights = "32") -> TrainedModel:
    """Load the model of a run, with its matrices in the format `weights`: a `TrainedLanguageModel`, a
    `TrainedClassifier`, or an encoder."""
    chosen = pick_device(device)  # first, so that a missing device is reported before anything is read
    on_cpu = chosen.type == "cpu"
    trained = reading(run, partial(_read, weights if on_cpu else "32"))
    trained.model.to(chosen).eval()
    if not on_cpu and weights != "32":
        quantize(trained.model, weights)
    return trained


def _read(weights: Weights, checkpoint: Path) -> TrainedModel:
    recipe, tokenizer, model = read_model(checkpoint, weights)
    saved = manifest.read(checkpoint)
    about = checkpoint, saved.step, trained_tokens(checkpoint), saved.files[WEIGHTS]["sha256"]
    if recipe.label_names is not None:
        return TrainedClassifier(model, tokenizer, recipe, *about)
    if isinstance(model, LanguageModel):
        return TrainedLanguageModel(model, tokenizer, recipe, *about, learn=recipe.learn)
    return TrainedModel(model, tokenizer, recipe, *about)


def load(
    run: str | Path,
    device: str = "auto",
    weights: Weights = "32",
    state_dtype: StateDtype = "auto",
    learn: bool | None = None,
) -> TrainedLanguageModel:
    """Load the language model of a run, from its best checkpoint by validation: its folder, name under runs/, or a
    checkpoint such as runs/NAME/checkpoints/latest. `device` is auto, cpu, cuda or mps.

    >>> model = lmlong.load("runs/quickstart", weights="bf16")

    `weights` is the format of the weight matrices: "bf16" takes half the memory and changes predictions a little,
    "int8" takes about a quarter and "int4" a sixth, and both change them more. `state_dtype` is the format of states:
    by default, keys and values of softmax and window layers are cached in bfloat16, and the recurrent sums S and z are
    float32; with "32", all are float32, as in training; with "64", S and z are float64, for texts of more than about
    ten million tokens. With `learn`, the output layer learns from each text while the model reads it; by default, as
    `learn` in the recipe of the run says.
    """
    if learn not in (None, True, False):
        raise UsageError(f"learn: {learn!r} is not a switch. Use True or False.")
    trained = open_run(run, device, weights)
    if isinstance(trained, TrainedClassifier):
        raise UsageError(
            f"{run}: a model of labels (objective: label) cannot continue text. Measure it by lmlong eval, serve it by "
            "lmlong serve, or load it in Python by lmlong.load_classifier."
        )
    if not isinstance(trained, TrainedLanguageModel):
        raise UsageError(
            f"{run}: an encoder (objective: masked) cannot continue text and has no state. Measure it by lmlong eval, "
            "or train a model with objective: causal."
        )
    if state_dtype not in (known := get_args(StateDtype)):
        raise UsageError(f"state_dtype: {state_dtype!r} is not a format of states. Choose from {', '.join(known)}.")
    if state_dtype == "64" and trained.device.type in WITHOUT_FLOAT64:
        raise UsageError(f"--state-dtype 64: {trained.device.type} has no float64. Use 32, or --device cpu.")
    model = trained.model
    if state_dtype == "64":
        model.set_state_dtype(torch.float64)
    if state_dtype == "auto":
        model.set_cache_dtype(CACHE_DTYPE)
    loaded = trained if learn is None else replace(trained, learn=learn)
    loaded.check_kernels("32")
    return loaded


def load_classifier(run: str | Path, device: str = "auto") -> TrainedClassifier:
    """Load the model of a run with objective: label, from its best checkpoint by validation."""
    trained = open_run(run, device)
    if not isinstance(trained, TrainedClassifier):
        raise UsageError(
            f"{run}: predicts tokens (objective: {trained.recipe.objective}), not labels. Train a model with "
            f"objective: label and training.init_from: {run}."
        )
    trained.check_kernels("32")
    return trained
