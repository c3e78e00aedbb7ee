"""Data modules: the training and validation batches of each objective."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np

from lmlong.data.batches import (
    Arrays,
    CausalBatch,
    TrainingBatches,
    scored_tokens,
    streams_of_each,
    validation_batches,
    validation_streams,
)
from lmlong.data.labels import LabelledBatches, LabelledDocuments, label_ids
from lmlong.data.masking import MaskedBatch, MaskedBatches, Masker, ValidationPieces
from lmlong.data.rows import CyclicTokens, Documents, Rows, Streams, Windows
from lmlong.data.token_dataset import TokenDataset
from lmlong.errors import UsageError
from lmlong.recipe import Recipe


class DataModule(ABC):
    """The text of a recipe as batches of its objective."""

    factor = 1
    """Documents are padded to a multiple of this many tokens."""

    def __init__(self, recipe: Recipe, tokens: TokenDataset):
        self.recipe, self.tokens = recipe, tokens
        self.length = recipe.text.sequence_length

    @abstractmethod
    def training(self) -> TrainingBatches:
        """Return all batches of the run, in order."""

    @abstractmethod
    def validation(self, limit: int | None = None, rank: int = 0, ranks: int = 1) -> Iterator[Arrays]:
        """Return one rank's batches of the validation text, or of a fixed even sample of `limit` tokens. All ranks have
        equally many. With `carry_state` each batch is read from the state after the previous batch."""

    @property
    def epoch_tokens(self) -> int:
        """The tokens of an epoch, as `Recipe.tokens_per_step` counts them."""
        return self.tokens.train_tokens

    @property
    def tokens_per_target(self) -> float:
        """The mean number of tokens that are read for each target."""
        return self.length / self.recipe.targets_per_sequence

    def rows(self) -> list[Rows]:
        """Return the rows of each source of the training text."""
        bos, eos = self.tokens.tokenizer.bos, self.tokens.tokenizer.eos
        texts = [CyclicTokens(file.tokens, file.starts, bos, eos, self.factor) for file in self.tokens.train]
        return [self._rows(text, (self.recipe.seed, number)) for number, text in enumerate(texts)]

    @abstractmethod
    def _rows(self, text: CyclicTokens, key: tuple[int, ...]) -> Rows:
        """Return the rows of one source."""


class CausalDataModule(DataModule):
    """Tokens, and the next token of each as its target."""

    def __init__(self, recipe: Recipe, tokens: TokenDataset):
        super().__init__(recipe, tokens)
        self.factor = recipe.model.factor  # so that the blocks of a batch begin and end together

    def training(self) -> TrainingBatches:
        training, eos, weights = self.recipe.training, self.tokens.tokenizer.eos, self.tokens.weights
        short_rows = self.recipe.text.short_steps * self.recipe.sequences_per_step
        return TrainingBatches(self.rows(), weights, eos, training.batch_size, training.carry_state, short_rows)

    def validation(self, limit: int | None = None, rank: int = 0, ranks: int = 1) -> Iterator[CausalBatch]:
        tokenizer, rows = self.tokens.tokenizer, self.recipe.training.batch_size
        text = scored_tokens(self.tokens.validation.tokens, tokenizer.bos, tokenizer.eos, self.factor)
        if self.recipe.training.carry_state:
            return validation_streams(text, self.length, rows, limit, rank, ranks)
        return islice(validation_batches(text, self.length, rows, limit, ranks), rank, None, ranks)

    def _rows(self, text: CyclicTokens, key: tuple[int, ...]) -> Rows:
        if self.recipe.text.rows == "documents":
            return Documents(text, self.length, key, self.recipe.sequences_per_step)
        if self.recipe.training.carry_state:
            return Streams(text, self.length, key, self._streams()[key[-1]])
        return Windows(text, self.length, key)

    def _streams(self) -> list[int]:
        """Return how many rows of a batch each source provides."""
        rows = self.recipe.batches_at_once * self.recipe.training.batch_size
        streams = streams_of_each(self.tokens.weights, rows)
        if not all(streams):
            raise UsageError(
                f"training.batch_size: with carry_state each row reads one source, and {streams.count(0)} of "
                f"{len(streams)} sources would get none of {rows} rows. Use more rows, or fewer sources."
            )
        return streams


class MaskedDataModule(DataModule):
    """Partly masked tokens, with the masked tokens as targets."""

    def __init__(self, recipe: Recipe, tokens: TokenDataset):
        super().__init__(recipe, tokens)
        self.masker = Masker(recipe.text.masking, tokens.tokenizer)
        self.whole_documents = recipe.text.rows == "documents"

    def training(self) -> TrainingBatches:
        rows, seed = self.recipe.training.batch_size, self.recipe.seed
        return MaskedBatches(self.rows(), self.tokens.weights, self.masker, rows, seed)

    def validation(self, limit: int | None = None, rank: int = 0, ranks: int = 1) -> Iterator[MaskedBatch]:
        text = self.tokens.validation
        pieces = ValidationPieces.of(text, self.length, self.whole_documents, limit)
        batches = pieces.batches(text.tokens, self.masker, self.recipe.training.batch_size, ranks)
        return islice(batches, rank, None, ranks)

    def _rows(self, text: CyclicTokens, key: tuple[int, ...]) -> Rows:
        if self.whole_documents:
            return Documents(text, self.length, key, self.recipe.sequences_per_step, packed=False)
        return Windows(text, self.length, key)


class LabelDataModule(DataModule):
    """Documents, one in each row, with their labels as targets."""

    def __init__(self, recipe: Recipe, tokens: TokenDataset):
        super().__init__(recipe, tokens)
        self.factor = 1 if recipe.is_encoder else recipe.model.factor

    @property
    def epoch_tokens(self) -> int:
        return self.length * sum(len(file.starts) for file in self.tokens.train)

    @property
    def tokens_per_target(self) -> float:
        sizes = np.concatenate([np.diff(file.starts, append=len(file.tokens)) for file in self.tokens.train])
        return float(sizes.clip(max=self.length).mean())

    def training(self) -> TrainingBatches:
        rows, eos = self.recipe.training.batch_size, self.tokens.tokenizer.eos
        return LabelledBatches(self.rows(), self.tokens.weights, eos, rows, self.recipe.is_encoder)

    def validation(self, limit: int | None = None, rank: int = 0, ranks: int = 1) -> Iterator[Arrays]:
        file, tokenizer = self.tokens.validation, self.tokens.tokenizer
        text = CyclicTokens(file.tokens, file.starts, tokenizer.bos, tokenizer.eos, self.factor)
        rows, is_encoder = self.recipe.training.batch_size, self.recipe.is_encoder
        batches = self._documents(text, (), file.labels).batches(rows, is_encoder, limit, ranks)
        return islice(batches, rank, None, ranks)

    def _rows(self, text: CyclicTokens, key: tuple[int, ...]) -> Rows:
        return self._documents(text, key, self.tokens.train[key[-1]].labels)

    def _documents(self, text: CyclicTokens, key: tuple[int, ...], labels: Sequence[str]) -> LabelledDocuments:
        ids = label_ids(labels, self.recipe.label_names or [])
        return LabelledDocuments(text, self.length, key, self.recipe.sequences_per_step, ids)


DATA_MODULES: dict[str, type[DataModule]] = {
    "causal": CausalDataModule,
    "masked": MaskedDataModule,
    "label": LabelDataModule,
}
