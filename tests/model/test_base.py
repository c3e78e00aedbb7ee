"""The output layer, and what all text models have in common."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

from lmlong import recipe
from lmlong.model.base import LMHead
from lmlong.model.language_model import LanguageModel


def test_the_output_layer_returns_logits_or_the_loss_of_targets() -> None:
    hidden, targets = torch.randn(2, 5, 4), torch.randint(6, (2, 5))
    head = LMHead(nn.Embedding(7, 4), has_mask_token=True)
    logits = head(hidden)
    assert logits.shape == (2, 5, 6), "the mask token is never predicted"
    expected = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(2, 5)
    assert_close(head(hidden, targets=targets, reduction="none"), expected)
    assert_close(head(hidden, targets=targets), expected.sum())


def test_tied_weights_are_stored_and_trained_once() -> None:
    for tied, names in ((True, []), (False, ["lm_head.output.weight"])):
        model = LanguageModel(recipe.Model(width=8, layers=1, heads=2, tied_output=tied), 10)
        assert [name for name in model.state_dict() if name.startswith("lm_head")] == names
        assert [name for name, _ in model.named_parameters() if name.startswith("lm_head")] == names
        assert (model.lm_head.weight is model.embedding.weight) == tied
        model.load_state_dict(model.state_dict())
