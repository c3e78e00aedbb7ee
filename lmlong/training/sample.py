"""A sample of text generated during training."""

import torch

from lmlong.data.tokenizers.base import Tokenizer
from lmlong.model.language_model import LanguageModel
from lmlong.model.loop_guard import LoopGuard, lower_loops
from lmlong.model.sampling_options import DEFAULTS


@torch.no_grad()
def write_sample(model: LanguageModel, tokenizer: Tokenizer, tokens: int, seed: int) -> str:
    """Return `tokens` tokens of text, one document after another, with the default sampling options.

    It uses a separate random generator, so training continues as if there had been no sample.
    """
    draw = torch.Generator().manual_seed(seed)
    token, state, written, guard = tokenizer.bos, None, [], LoopGuard(DEFAULTS)
    for _ in range(tokens):
        read = torch.tensor([[token]], device=model.embedding.weight.device)
        hidden, state = model(read, state, read == tokenizer.bos)
        logits = lower_loops(model.logits(hidden[:, -1]).float().cpu(), [guard])
        token = int(torch.multinomial((logits[0] / DEFAULTS.temperature).softmax(-1), 1, generator=draw))
        written.append(token)
        guard.append(token)
        if token == tokenizer.eos:
            token, guard = tokenizer.bos, LoopGuard(DEFAULTS)
    return tokenizer.decode(written)
