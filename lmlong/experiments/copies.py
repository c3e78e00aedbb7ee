"""A corpus that only memory can predict: documents that repeat the same random letters."""

import json
import random
from pathlib import Path
from string import ascii_lowercase


def write_copies(path: Path, documents: int = 4000, block: int = 100, times: int = 5, seed: int = 0) -> None:
    """Write a .jsonl of documents, each a block of random letters on a line, the same line several times.

    The first line costs log2(26) bits a letter, whoever reads; each further one is free to a reader who remembers it.
    """
    draw = random.Random(seed)
    lines = ("".join(draw.choices(ascii_lowercase, k=block)) + "\n" for _ in range(documents))
    path.write_text("".join(json.dumps({"text": line * times}) + "\n" for line in lines), encoding="utf-8")
