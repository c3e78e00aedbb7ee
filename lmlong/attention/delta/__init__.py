"""The delta rule: a state in which what a key has stored can be replaced."""
