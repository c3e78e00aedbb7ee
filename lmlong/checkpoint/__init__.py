"""Checkpoints: self-describing folders, written whole or not at all, and read only after every byte was verified."""
