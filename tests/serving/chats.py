"""Models that are talked with, and what they answer in Python."""

from pathlib import Path
from typing import Any

from interop import tiny_llama
from interop.tiny_llama import CHAT, CONFIG, write_folder

import lmlong
from lmlong.inference import session as sessions
from lmlong.inference.chat import encode, render
from lmlong.inference.loading import TrainedLanguageModel
from lmlong.inference.sampling import Sampling
from lmlong.interop.importing import import_model
from lmlong.serving.answers import printable

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " The quick </s> brown fox?\n"},
    {"role": "assistant", "content": "boxing"},
    {"role": "user", "content": "No [user] wizards"},
]


def chatting(folder: Path, template: str = CHAT) -> TrainedLanguageModel:
    folder.mkdir(exist_ok=True)
    import_model(write_folder(folder / "theirs", CONFIG, tiny_llama.weights(CONFIG), template=template), folder / "run")
    trained = lmlong.load(folder / "run")
    trained.use_fast_engine()
    return trained


def expected(
    trained: TrainedLanguageModel, talk: list[dict[str, str]], row: int = 0, **options: Any
) -> tuple[str, int]:
    """The answer to messages, and the tokens that they take."""
    tokens = list(encode(trained.tokenizer, render(trained.tokenizer, talk)))
    session = sessions.prefill(trained.model, [tokens])
    most = options.pop("max_tokens")
    written = trained.generate(session, Sampling(**options), [(row,)], most)
    return printable("".join(piece for _, piece in written)), len(tokens)
