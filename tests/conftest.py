"""What all tests share: one thread each, for tiny tensors gain nothing from two."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)
