"""What learning while reading gains on single documents, and whether it ever costs.

    python tools/learning_documents.py FOLDER --novels BOOKS
    python tools/learning_gain.py FOLDER novel=runs/library package=runs/quickstart log=runs/logs genome=runs/genome

Each document of learning_documents.json is read from its start, up to --tokens, without learning and with it. Errors
are those of the mean of the differences. --tuning measures the other documents, on which the rates were chosen.
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch

import lmlong
from lmlong.inference.loading import TrainedLanguageModel
from lmlong.model.learning.read import first_state, score

DOCUMENTS = Path(__file__).with_name("learning_documents.json")
PIECE = 1024


@torch.inference_mode()
def bits(model: TrainedLanguageModel, tokens: list[int], learn: bool) -> float:
    """Return the bits of all tokens but the first, which is bos."""
    ids = torch.tensor([tokens])
    state, nats = first_state(model.model, 1, learn), 0.0
    for begin in range(0, len(tokens) - 1, PIECE):
        end = min(begin + PIECE, len(tokens) - 1)
        nll, state = score(model.model, ids[:, begin:end], ids[:, begin + 1 : end + 1], state)
        nats += float(nll.double().sum())
    return nats / math.log(2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("runs", nargs="+", metavar="KIND=RUN")
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--tuning", action="store_true")
    given = parser.parse_args()
    chosen = json.loads(DOCUMENTS.read_text())["tuning" if given.tuning else "documents"]
    for kind, run in (each.split("=", 1) for each in given.runs):
        model, changes, shares = lmlong.load(run, "cpu"), [], []
        for document in (each for each in chosen if each["kind"] == kind):
            text = (given.folder / ("tuning" if given.tuning else "documents") / f"{document['name']}.txt").read_bytes()
            tokens = [model.tokenizer.bos, *model.tokenizer.encode(text.decode())][: given.tokens + 1]
            size = int(model.tokenizer.token_bytes[tokens[1:]].sum())
            plain, learned = (bits(model, tokens, learn) / size for learn in (False, True))
            changes.append(learned - plain)
            shares.append(learned / plain - 1)
            name, count = document["name"][:40], len(tokens) - 1
            print(f"{name:40} {count:7,} tokens {plain:8.4f} {learned:8.4f} {changes[-1]:+8.4f}", flush=True)
        error = np.std(changes, ddof=1) / math.sqrt(len(changes))
        mean = f"{np.mean(changes):+.4f} ± {error:.4f} bits per byte, {np.mean(shares):+.1%}"
        print(f"{kind}: {mean}, worst {max(changes):+.4f}\n", flush=True)


if __name__ == "__main__":
    main()
