"""Text sampled from a trained model: tokens to measure on, or a file for another model to learn from."""

import json
import re
import sys
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

from lmlong import recipe
from lmlong.data.sources import open_sources
from lmlong.data.split import Part, split
from lmlong.errors import UsageError
from lmlong.inference.loading import TrainedLanguageModel, load
from lmlong.inference.sampling import Sampler
from lmlong.inference.session import repeat_rows
from lmlong.io.files import atomic_write
from lmlong.model.sampling_options import Sampling
from lmlong.report.progress import Progress, each

ROWS = 16
"""Documents sampled in parallel."""

DOCUMENT = re.compile(rb'\{"text": ".*(", "tokens": \d+\}\n)?')
"""The first line of a file of samples, which may be cut off."""


def check_samples(file: Path, joined: Path) -> None:
    """Refuse to replace files that `write_samples` and `join_samples` did not write."""
    if file.exists():
        with file.open("rb") as opened:
            if DOCUMENT.fullmatch(line := opened.readline()) or not line:
                return
    elif not joined.exists():
        return
    other = file if file.exists() else joined
    raise UsageError(f"{other}: not text that lmlong sampled, and it would be replaced. Move it, or choose --out.")


def write_samples(run: str, file: Path, tokens: int, length: int, seed: int) -> None:
    """Write documents of up to `length` tokens, sampled from the model of a run, until they have `tokens` tokens.

    The file has one document on each line, as JSON. Document n depends only on the seed and n, so a partial file can be
    continued.
    """
    lines = _whole_lines(file)
    written = sum(json.loads(line)["tokens"] for line in lines)
    if written >= tokens:
        return
    model = load(run)
    if model.fast_step_at_once:
        model.use_fast_step()
    print(f"{file}: {tokens:,} tokens of {run}'s own text", file=sys.stderr)
    file.parent.mkdir(parents=True, exist_ok=True)
    with Progress(file.name, tokens, "tokens") as progress, file.open("w", encoding="utf-8") as out:
        progress.skip(written)
        out.writelines(lines)
        for first in count(len(lines), ROWS):
            documents = _documents(model, first, length, seed)
            out.writelines(json.dumps(document) + "\n" for document in documents)
            out.flush()
            new = sum(document["tokens"] for document in documents)
            progress.update(new)
            written += new
            if written >= tokens:
                return


def join_samples(text: recipe.Text, joined: Path) -> None:
    """Write the training documents of a text one after another as a single document, without held-out documents."""
    samples = open_sources(text)[0]
    parts = split(samples.documents(), samples.held_out)
    trained = [part for part in parts if isinstance(part, Part) and part.split == "train"]
    atomic_write(joined, "".join("".join(part.pieces()) + "\n" for part in trained))


@torch.inference_mode()
def sampled_text(loaded: TrainedLanguageModel, rows: int, tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Sample tokens (rows, tokens) at temperature 1, one document after another; return them and the document
    starts."""
    device = loaded.model.embedding.weight.device
    sampler = Sampler(_plain(seed), [(row,) for row in range(rows)])
    token = torch.full((rows,), loaded.tokenizer.bos, device=device)
    written, state = [], None
    for _ in each(range(tokens), "writing a text", tokens, "tokens"):
        written.append(token)
        logits, state = loaded.model(token[:, None], state, token[:, None] == loaded.tokenizer.bos)
        ended = token == loaded.tokenizer.eos
        token = torch.where(ended, loaded.tokenizer.bos, sampler(logits[:, 0]).to(device))
    text = torch.stack(written, dim=1).clone()
    return text, text == loaded.tokenizer.bos


def _plain(seed: int) -> Sampling:
    """Return sampling options that leave the model's distribution unchanged."""
    return Sampling(temperature=1.0, loop_penalty=0, seed=seed)


def _documents(model: TrainedLanguageModel, first: int, length: int, seed: int) -> list[dict]:
    """Return ROWS documents from number `first` on."""
    numbers = [(number,) for number in range(first, first + ROWS)]
    drawn = model.generate(repeat_rows(model.read(""), ROWS), _plain(seed), numbers, length)
    texts = [""] * ROWS
    for row, piece in drawn:
        texts[row] += piece
    return [{"text": text, "tokens": row.written} for text, row in zip(texts, drawn.rows, strict=True)]


def _whole_lines(file: Path) -> list[str]:
    """Return the lines of complete batches in an existing file."""
    if not file.exists():
        return []
    lines = [line for line in file.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
    return lines[: len(lines) // ROWS * ROWS]
