"""From text to batches of tokens; the only package that imports sentencepiece and datasets, and it imports no torch."""
