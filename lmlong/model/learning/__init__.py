"""Learning while reading: the output layer of a model learns from each text that the model reads."""
