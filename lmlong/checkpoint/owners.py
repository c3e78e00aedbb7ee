"""The hashes by which a state is bound to the model that read its text."""

import hashlib

from lmlong.attention.favor import Favor
from lmlong.data.tokenizers.base import Tokenizer
from lmlong.model.language_model import LanguageModel


def owners(model: LanguageModel, tokenizer: Tokenizer, weights: str) -> dict[str, str]:
    """Return the hashes that a state is bound to; `weights` is the hash of the weights file."""
    drawn = [module.projection.detach().cpu().float() for module in model.modules() if isinstance(module, Favor)]
    features = hashlib.sha256(b"".join(rows.numpy().tobytes() for rows in drawn)).hexdigest() if drawn else "none"
    return {"tokenizer": tokenizer.hash, "features": features, "model": weights}
