"""The model `lmlong` of EleutherAI's lm-evaluation-harness: importing this module registers it there."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lm_eval.models  # noqa: F401  the harness registers its own models only where nothing is registered yet
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs

from lmlong import __version__
from lmlong.attention.plugins import load_plugin
from lmlong.errors import UsageError, nearest
from lmlong.evaluation.likelihoods import Pair, document_likelihoods, likelihoods
from lmlong.evaluation.padded_batches import batches, prefill_rows
from lmlong.inference import chat
from lmlong.inference.loading import TrainedLanguageModel, load
from lmlong.inference.sampling import Sampling
from lmlong.model.base import count_parameters
from lmlong.report.progress import Progress, each

MAX_GEN_TOKS = 256
"""Tokens to generate if a task does not specify them, the default of the harness."""

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Sampling options that a task may set."""


@register_model("lmlong")
class HarnessModel(LM):
    """A trained model in the interface of the harness: `--model lmlong --model_args run=RUN`."""

    def __init__(
        self,
        run: str | Path | TrainedLanguageModel,
        device: str = "auto",
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        weights: str | int = "32",
        state_dtype: str | int = "32",
        score_eos: bool = False,
        seed: int = 0,
        plugin: str | None = None,
    ):
        """`batch_size` rows are read in a batch, by default ("auto") a number chosen for speed. With `score_eos` the
        end of a document is part of its likelihood. `seed` is that of sampling."""
        super().__init__()
        if plugin:
            load_plugin(plugin)
        device = "auto" if device.startswith("cuda:") else device  # the harness's default, even without a GPU
        formats: Any = {"weights": str(weights), "state_dtype": str(state_dtype)}  # the harness reads 64 as a number
        self.loaded = run if isinstance(run, TrainedLanguageModel) else load(run, device, learn=False, **formats)
        self.tokenizer = self.loaded.tokenizer
        self.rows = max_batch_size if batch_size in (None, "auto") else _rows(batch_size)
        self.score_eos, self.seed = score_eos, seed

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return log p of each continuation after its context, and whether greedy decoding would generate it."""
        pairs = [self.pair(*request.args) for request in requests]
        answers = [(0.0, True)] * len(pairs)
        computed = likelihoods(self.loaded.model, pairs, self.rows)
        name = "Running loglikelihood requests"
        for number, answer in each(computed, name, len(pairs), "requests", not disable_tqdm):
            answers[number] = (answer.log_probability, answer.is_greedy)
            self.cache_hook.add_partial("loglikelihood", requests[number].args, answers[number])
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return log p of each document, read in one pass."""
        texts = [request.args[0] for request in requests]
        return document_likelihoods(self.loaded, texts, score_eos=self.score_eos, show=not disable_tqdm)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the text that follows each context, up to the first of its stop strings."""
        same_options: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            same_options.setdefault(repr(request.args[1]), []).append(number)
        texts = [""] * len(requests)
        with Progress("Running generate_until requests", len(texts), "requests", not disable_tqdm) as progress:
            for numbers in same_options.values():
                options = requests[numbers[0]].args[1]
                contexts = sorted(((self.tokens(requests[n].args[0]), n) for n in numbers), key=lambda x: -len(x[0]))
                for batch in batches(self.loaded.model, [len(context) for context, _ in contexts], self.rows):
                    self._generate(contexts[batch], options, texts)
                    progress.update(len(contexts[batch]))
                    for _, number in contexts[batch]:
                        self.cache_hook.add_partial("generate_until", requests[number].args, texts[number])
        return texts

    def _generate(self, contexts: Sequence[tuple[list[int], int]], options: dict[str, Any], texts: list[str]) -> None:
        """Continue contexts, each with the number of its text."""
        sampling, max_tokens, stop = generation_options(options, self.seed)
        sessions = prefill_rows(self.loaded.model, [context for context, _ in contexts])
        drawn = [(number,) for _, number in contexts]
        for row, piece in self.loaded.generate(sessions, sampling, drawn, max_tokens, stop):
            texts[contexts[row][1]] += piece

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of the beginning of a document, bos first, unless a chat template provides it."""
        if text.startswith(chat.APART):
            return list(chat.encode(self.tokenizer, text))
        return [self.tokenizer.bos, *self.tokenizer.encode(text)]

    def pair(self, context: str, continuation: str) -> Pair:
        """Return the tokens of the context without its final spaces, and those of the continuation with them. A token
        across both belongs to the continuation: some tokenizers have pieces that span words."""
        if context.startswith(chat.APART):
            continuation = chat.apart(self.tokenizer, continuation)
        whole, before = self.tokens(context + continuation), self.tokens(context.rstrip())
        differ = (index for index, (a, b) in enumerate(zip(whole, before, strict=False)) if a != b)
        shared = max(1, next(differ, min(len(whole), len(before))))
        return Pair(tuple(whole[:shared]), tuple(whole[shared:]))

    @property
    def tokenizer_name(self) -> str:
        """The key of the tokenizer in the harness's caches of requests."""
        return f"lmlong-{self.tokenizer.hash[:16]}"

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self.tokenizer.chat_template if chat_template else ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the text of messages, up to the beginning of the answer or with a given beginning. It starts with a
        character that no text has, so that `tokens` reads the names of special tokens in it as such."""
        if self.tokenizer.chat_template is None:
            raise UsageError(
                f"{self.loaded.checkpoint}: its tokenizer has no chat template. Use a model made for chat."
            )
        if add_generation_prompt:
            return chat.APART + chat.render(self.tokenizer, chat_history)
        *messages, answer = chat_history
        text = chat.render(self.tokenizer, messages)
        return chat.APART + text + chat.apart(self.tokenizer, answer["content"])

    def get_model_info(self) -> dict[str, Any]:
        """Return the description of the model in the harness's results."""
        return {
            "model": "lmlong",
            "model_num_parameters": count_parameters(self.loaded.model),
            "checkpoint": str(self.loaded.checkpoint),
            "weights_sha256": self.loaded.weights_hash,
            "score_eos": self.score_eos,
            "lmlong_version": __version__,
        }


def generation_options(given: dict[str, Any], seed: int) -> tuple[Sampling, int, list[str]]:
    """Return the sampling, the number of tokens and the stop strings of a task; greedy, unless it sets `do_sample`."""
    options: dict[str, Any] = dict(normalize_gen_kwargs(given, MAX_GEN_TOKS))
    stop = [word for word in options.pop("until") if word]
    max_tokens, do_sample = options.pop("max_gen_toks"), options.pop("do_sample")
    chosen = {name: options.pop(name) for name in SAMPLING if name in options}
    if not (chosen.get("top_k") or 0) > 0:
        chosen["top_k"] = None
    chosen["temperature"] = chosen.get("temperature", 1.0) if do_sample else 0.0
    if options.pop("num_beams", 1) != 1:
        raise UsageError("generation_kwargs: num_beams is above 1, and beam search is not supported. Leave it out.")
    if options:
        name = next(iter(options))
        raise UsageError(f"generation_kwargs: {name} is not one of {SAMPLING}.{nearest(name, SAMPLING)} Leave it out.")
    return Sampling(**chosen, loop_penalty=0, seed=seed), max_tokens, stop


def _rows(batch_size: int | str | None) -> int:
    if str(batch_size).isdecimal() and int(str(batch_size)) > 0:
        return int(str(batch_size))
    raise UsageError(f"batch_size: {batch_size} is not a number of rows. Give a whole number from 1, or auto.")
