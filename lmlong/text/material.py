"""What the model of a recipe reads, by its objective: batches to train on, and a text to validate on."""

from abc import ABC, abstractmethod
from collections.abc import Iterator

from lmlong.recipe import Recipe
from lmlong.text.batches import Arrays, Batch, TrainingBatches, validation_batches
from lmlong.text.masking import MaskedBatch, MaskedBatches, Masker, Pieces
from lmlong.text.ring import Ring
from lmlong.text.rows import Documents, Rows, Streams, Windows
from lmlong.text.tokens import Tokens


class Material(ABC):
    """The text of a recipe, as its objective has it."""

    factor = 1
    """Tokens to a multiple of which documents are padded."""

    def __init__(self, recipe: Recipe, tokens: Tokens):
        self.recipe, self.tokens = recipe, tokens
        self.length = recipe.text.sequence_length

    @abstractmethod
    def training(self) -> TrainingBatches:
        """The batches of the run, all of them, in order."""

    @abstractmethod
    def validation(self, limit: int | None = None, ranks: int = 1) -> Iterator[Arrays]:
        """The validation text or its first `limit` tokens, in batches whose number is a multiple of `ranks`."""

    def rows(self) -> list[Rows]:
        """How each source of the training text is cut into rows."""
        bos, eos = self.tokens.tokenizer.bos, self.tokens.tokenizer.eos
        rings = [Ring(file.tokens, file.starts, bos, eos, self.factor) for file in self.tokens.train]
        return [self._rows(ring, (self.recipe.seed, number)) for number, ring in enumerate(rings)]

    @abstractmethod
    def _rows(self, ring: Ring, key: tuple[int, ...]) -> Rows:
        """The rows of one source."""


class NextTokens(Material):
    """Texts and what follows each of their tokens."""

    def __init__(self, recipe: Recipe, tokens: Tokens):
        super().__init__(recipe, tokens)
        self.factor = recipe.model.factor  # so that the blocks of a batch begin and end together

    def training(self) -> TrainingBatches:
        training, eos = self.recipe.training, self.tokens.tokenizer.eos
        return TrainingBatches(self.rows(), self.tokens.weights, eos, training.batch_size, training.carry_state)

    def validation(self, limit: int | None = None, ranks: int = 1) -> Iterator[Batch]:
        text, tokenizer = self.tokens.validation.tokens, self.tokens.tokenizer
        rows = self.recipe.training.batch_size
        return validation_batches(text, tokenizer.bos, tokenizer.eos, self.length, rows, limit, ranks, self.factor)

    def _rows(self, ring: Ring, key: tuple[int, ...]) -> Rows:
        if self.recipe.text.rows == "documents":
            return Documents(ring, self.length, key, self.recipe.sequences_per_step)
        return (Streams if self.recipe.training.carry_state else Windows)(ring, self.length, key)


class HiddenTokens(Material):
    """Texts with some of their tokens hidden."""

    def __init__(self, recipe: Recipe, tokens: Tokens):
        super().__init__(recipe, tokens)
        self.masker = Masker(recipe.text.masking, tokens.tokenizer)
        self.whole_documents = recipe.text.rows == "documents"

    def training(self) -> TrainingBatches:
        rows, seed = self.recipe.training.batch_size, self.recipe.seed
        return MaskedBatches(self.rows(), self.tokens.weights, self.masker, rows, seed)

    def validation(self, limit: int | None = None, ranks: int = 1) -> Iterator[MaskedBatch]:
        text = self.tokens.validation.first(limit)
        pieces = Pieces.of(text, self.length, self.whole_documents)
        return pieces.batches(text.tokens, self.masker, self.recipe.training.batch_size, ranks)

    def _rows(self, ring: Ring, key: tuple[int, ...]) -> Rows:
        if self.whole_documents:
            return Documents(ring, self.length, key, self.recipe.sequences_per_step, packed=False)
        return Windows(ring, self.length, key)


MATERIAL: dict[str, type[Material]] = {"causal": NextTokens, "masked": HiddenTokens}
