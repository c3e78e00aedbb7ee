"""From text to batches of tokens. Only this package imports sentencepiece and datasets; it does not import torch."""
