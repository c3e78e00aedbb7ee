"""From text to batches of tokens; the only place that knows sentencepiece and datasets, and it imports no torch."""
