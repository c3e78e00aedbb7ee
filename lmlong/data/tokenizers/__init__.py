"""Tokenizers: bytes, characters of an alphabet, sentencepiece models, and tokenizer.json files."""
