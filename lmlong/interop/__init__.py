"""Import and export of models in formats of other programs."""
