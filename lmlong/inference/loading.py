"""A trained model, taken from its run and ready to write."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lmlong.checkpoint.read import check_size, find, load_weights, read_recipe, tokenizer_path
from lmlong.errors import UsageError
from lmlong.inference.sampling import Sampler, Sampling
from lmlong.inference.streaming import stream, stream_text
from lmlong.model.device import pick_device
from lmlong.model.language_model import LanguageModel
from lmlong.recipe import Recipe
from lmlong.text import tokenizer as tokenizers
from lmlong.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Loaded:
    """A trained model with all that belongs to it."""

    model: LanguageModel
    tokenizer: Tokenizer
    recipe: Recipe
    checkpoint: Path

    def stream(
        self,
        prompt: str = "",
        *,
        max_tokens: int | None = 200,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
        stop: Sequence[str] = (),
    ) -> Iterator[str]:
        """Continue a prompt, piece by piece as the text is written, without the prompt itself.

        >>> model = lmlong.load("runs/quickstart")
        >>> for piece in model.stream("def ", max_tokens=100):
        ...     print(piece, end="", flush=True)

        The text ends where the model ends the document, after `max_tokens` tokens (None: never), or before a `stop`
        string. The other options are those of `Sampling`; the same seed gives the same text.
        """
        if max_tokens is not None and max_tokens < 0:
            raise UsageError(f"max_tokens: {max_tokens} is negative. Give a number of tokens, or None for no end.")
        if "" in stop or isinstance(stop, str):
            raise UsageError(f"stop: {stop!r} is no list of strings that are not empty. Name the strings to stop at.")
        sampler = Sampler(Sampling(temperature, top_k, top_p, min_p, seed))
        document = [self.tokenizer.bos, *self.tokenizer.encode(prompt)]
        tokens = stream(self.model, document, sampler, max_tokens, self.tokenizer.eos)
        return stream_text(tokens, self.tokenizer, stop)


def load(run: str | Path, device: str = "auto") -> Loaded:
    """The model of a run: its folder, its name under runs/, or a checkpoint; `device` is auto, cpu or cuda."""
    place = pick_device(device)
    checkpoint = find(run)
    recipe, tokenizer = read_recipe(checkpoint), tokenizers.load(tokenizer_path(checkpoint))
    check_size(checkpoint, recipe, lambda recipe: LanguageModel(recipe.model, tokenizer.vocabulary))
    model = LanguageModel(recipe.model, tokenizer.vocabulary)
    load_weights(model, checkpoint)
    return Loaded(model.to(place).eval(), tokenizer, recipe, checkpoint)
