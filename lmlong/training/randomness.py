"""The states of all random generators, as plain values and tensors that a checkpoint may hold."""

import random
from typing import Any

import numpy as np
import torch

from lmlong.errors import CheckpointError


def random_states() -> dict[str, Any]:
    """What Python, numpy, torch and each GPU would draw next."""
    kind, words, place, has_gauss, gauss = np.random.get_state()
    return {
        "python": list(random.getstate()[1]),
        "numpy": [kind, np.asarray(words).tolist(), place, has_gauss, gauss],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all(),
    }


def restore(states: dict[str, Any]) -> None:
    """Go on drawing from states that were kept; those of GPUs only where as many are there."""
    try:
        if not 0 <= states["numpy"][2] <= 624:  # numpy itself reads past its numbers then
            raise ValueError("numpy's place is none")
        random.setstate((random.getstate()[0], tuple(states["python"]), None))
        np.random.set_state(tuple(states["numpy"]))
        torch.set_rng_state(states["torch"])
        if len(states["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(states["cuda"])
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise CheckpointError(f"the random states of the checkpoint are none ({error}). Use another one.") from error
