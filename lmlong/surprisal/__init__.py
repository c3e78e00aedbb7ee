"""Surprisal along a stream: the bits of each token, byte, line or record of a text, as it is read."""
