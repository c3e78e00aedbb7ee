"""A sample of what a model writes while it is trained."""

import torch

from lmlong.data.tokenizer import Tokenizer
from lmlong.model.language_model import LanguageModel

TEMPERATURE = 0.8


@torch.no_grad()
def write_sample(model: LanguageModel, tokenizer: Tokenizer, tokens: int, seed: int) -> str:
    """Return `tokens` tokens of text, one document after the other, drawn by numbers of their own, so that training
    goes on as if there had been no sample."""
    draw = torch.Generator().manual_seed(seed)
    token, state, written = tokenizer.bos, None, []
    for _ in range(tokens):
        read = torch.tensor([[token]], device=model.embedding.weight.device)
        logits, state = model(read, state, read == tokenizer.bos)
        chances = (logits[0, -1].float().cpu() / TEMPERATURE).softmax(-1)
        token = int(torch.multinomial(chances, 1, generator=draw))
        written.append(token)
        if token == tokenizer.eos:
            token = tokenizer.bos
    return tokenizer.decode(written)
