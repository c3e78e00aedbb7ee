"""Text that a trained model writes, as a file for another one to learn from."""

import json
import sys
from itertools import count
from pathlib import Path

from tqdm import tqdm

from lmlong import recipe
from lmlong.data.sources import open_inputs
from lmlong.data.split import Part, split
from lmlong.inference.loading import TrainedLanguageModel, load
from lmlong.inference.session import repeat_rows
from lmlong.io.files import atomic_write
from lmlong.model.sampling_options import Sampling

ROWS = 16
"""Documents written at a time."""


def write_samples(run: str, file: Path, tokens: int, length: int, seed: int) -> None:
    """Write documents as the model of a run draws them, of at most `length` tokens each, until they have so many
    tokens: one a line, as JSON. Document n depends on the seed and on n alone, so it goes on with a file that was
    begun."""
    lines = _whole_lines(file)
    written = sum(json.loads(line)["tokens"] for line in lines)
    if written >= tokens:
        return
    model = load(run)
    if model.fast_step_at_once:
        model.use_fast_step()
    print(f"{file}: {tokens:,} tokens of {run}'s own text", file=sys.stderr)
    bar = tqdm(total=tokens, initial=written, unit=" tokens", dynamic_ncols=True, disable=None)
    file.parent.mkdir(parents=True, exist_ok=True)
    with bar, file.open("w", encoding="utf-8") as out:
        out.writelines(lines)
        for first in count(len(lines), ROWS):
            found = _documents(model, first, length, seed)
            out.writelines(json.dumps(each) + "\n" for each in found)
            out.flush()
            bar.update(new := sum(each["tokens"] for each in found))
            if (written := written + new) >= tokens:
                return


def join_samples(text: recipe.Text, joined: Path) -> None:
    """Write the documents that a text trains on one after the other, as one; what it holds out stays unread."""
    samples = open_inputs(text)[0]
    parts = split(samples.source.documents(), samples.held_out)
    trained = [part for part in parts if isinstance(part, Part) and part.split == "train"]
    atomic_write(joined, "".join("".join(part.pieces()) + "\n" for part in trained))


def _documents(model: TrainedLanguageModel, first: int, length: int, seed: int) -> list[dict]:
    """Return the documents from the number `first` on."""
    numbers = [(number,) for number in range(first, first + ROWS)]
    drawn = model.generate(
        repeat_rows(model.read(""), ROWS), Sampling(temperature=1.0, loop_penalty=0, seed=seed), numbers, length
    )
    texts = [""] * ROWS
    for row, piece in drawn:
        texts[row] += piece
    return [{"text": text, "tokens": row.written} for text, row in zip(texts, drawn.rows, strict=True)]


def _whole_lines(file: Path) -> list[str]:
    """Return the documents of whole batches in a file that was begun."""
    if not file.exists():
        return []
    lines = [line for line in file.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
    return lines[: len(lines) // ROWS * ROWS]
