"""How far the text before a point changes what a model predicts, though it may not predict better.

N targets, V vocabulary.
"""

import numpy as np
import torch
from torch import Tensor

from lmlong.evaluation.scorer import Predictor
from lmlong.model.loss import LOGITS_CHUNK


@torch.inference_mode()
def divergence(model: Predictor, with_text: Tensor, without: Tensor) -> np.ndarray:
    """Return KL(p || q) of each target (N,) in nats, from the hidden states (N, width) that lead to p, read with the
    text before a point, and to q, read without it.

    Nats, as the loss: were p the truth, the loss without that text would be higher by so much. Unlike a change of the
    loss it never cancels, and it is 0 only where the text is forgotten.
    """
    found = [np.zeros(0)]
    for one, other in zip(with_text.split(LOGITS_CHUNK), without.split(LOGITS_CHUNK), strict=True):
        log_p, log_q = (model.logits(hidden).double().log_softmax(-1) for hidden in (one, other))
        found.append((log_p.exp() * (log_p - log_q)).sum(-1).cpu().numpy())
    return np.concatenate(found)
