"""Speed of writing, token by token, at several lengths of the text before: ours, and GPT-2 in transformers.

    pip install transformers && python tools/compare_decode.py --plot docs/images/decode.png

Each candidate is filled with a text of the length first, untimed, then writes; rounds of all candidates take turns,
so that a machine that slows down does so for all, and a few tokens before each round are not timed either: they find
the weights of another model in the processor's cache. Float32, batch 1, random weights of the same shape: layers,
width, vocabulary, and an MLP of about as many parameters. transformers runs with its dynamic and its static cache; ours
by torch and by native code, with matrices kept in float32, bfloat16 and int8. The ratios are of native code to the
better of the two caches.
"""

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from lmlong import recipe
from lmlong.inference.session import Session, append_token, next_logits, prefill
from lmlong.model.base import count_parameters
from lmlong.model.fast_step import make_fast_step
from lmlong.model.language_model import LanguageModel

VOCABULARY = 8192
SHAPES = {"small": (4, 256, 4), "large": (12, 768, 12)}  # layers, width, heads
LENGTHS = (128, 1024, 8192, 32768)
ROUNDED = {"bf16": torch.bfloat16, "int8": torch.int8}
WARM = 2
"""Tokens at the beginning of a round."""
Write = Callable[[], None]
"""Write one token."""


def ours(kind: str, layers: int, width: int, heads: int) -> tuple[LanguageModel, int]:
    shape = recipe.Model(layers=layers, width=width, heads=heads, attention=recipe.Attention(kind=kind))  # type: ignore[arg-type]
    torch.manual_seed(0)
    model = LanguageModel(shape, VOCABULARY).eval()
    return model, count_parameters(model)


def filled(model: LanguageModel, length: int) -> Session:
    """What a model remembers of a text of so many tokens."""
    tokens = torch.randint(VOCABULARY, (length,), generator=torch.Generator().manual_seed(1)).tolist()
    return prefill(model, [tokens])


def ours_at(model: LanguageModel, session: Session) -> Write:
    """The model after a text."""
    held = [session]

    def write() -> None:
        logits, state = next_logits(model, held[0])
        held[0] = append_token(held[0], state, logits.argmax(-1))

    return write


def native(model: LanguageModel, kept: torch.dtype = torch.float32) -> LanguageModel:
    """The same model, its step as native code, with its matrices kept so."""
    other = copy.deepcopy(model)
    if kept != torch.float32:
        other.quantize(kept)
    other.fast_step = make_fast_step(other)
    return other


def gpt2(layers: int, width: int, heads: int) -> tuple[Any, int]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(  # type: ignore[call-arg]  # transformers takes more than it declares
        vocab_size=VOCABULARY,
        n_positions=max(LENGTHS) + 4096,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).eval()
    return model, sum(weight.numel() for weight in model.parameters())


def gpt2_at(model: Any, length: int, static: bool, rounds: int) -> Write:
    """GPT-2 after so many tokens: its cache holds random keys and values, which take as long as any others."""
    from transformers import DynamicCache, StaticCache

    cache = StaticCache(config=model.config, max_cache_len=length + rounds) if static else DynamicCache()
    heads, head_width = model.config.n_head, model.config.n_embd // model.config.n_head
    for layer in range(model.config.n_layer):
        cache.update(torch.randn(1, heads, length, head_width), torch.randn(1, heads, length, head_width), layer)
    held = [torch.randint(VOCABULARY, (1, 1))]
    place = torch.tensor([length])

    @torch.inference_mode()
    def write() -> None:
        out = model(held[0], past_key_values=cache, cache_position=place, position_ids=place[None])
        held[0] = out.logits[:, -1].argmax(-1, keepdim=True)
        place.add_(1)

    return write


def seconds(writers: dict[str, Write], tokens: int, rounds: int, threads: int) -> dict[str, float]:
    """Median seconds a token of each, its rounds in turn with those of the others."""
    usual = torch.get_num_threads()
    torch.set_num_threads(threads)
    taken: dict[str, list[float]] = {name: [] for name in writers}
    for number in range(rounds + 1):
        for name, write in writers.items():
            for _ in range(WARM):
                write()
            begun = time.perf_counter()
            for _ in range(tokens):
                write()
            if number:  # the first round warms up
                taken[name].append((time.perf_counter() - begun) / tokens)
    torch.set_num_threads(usual)
    return {name: statistics.median(times) for name, times in taken.items()}


def measure(shape: str, lengths: list[int], tokens: int, rounds: int, threads: int) -> list[dict[str, Any]]:
    """Tokens per second of every candidate at every length."""
    layers, width, heads = SHAPES[shape]
    linear, count = ours("linear", layers, width, heads)
    native_steps = {"native": native(linear)}
    native_steps |= {f"native, {name}": native(linear, kept) for name, kept in ROUNDED.items()}
    softmax, softmax_count = ours("softmax", layers, width, heads)
    other, other_count = gpt2(layers, width, heads) if find_spec("transformers") else (None, 0)
    if other is None:
        print("transformers is not installed: left out")
    print(f"\n{shape}: {layers} layers of width {width}")
    print(f"parameters: linear {count:,}, softmax {softmax_count:,}, GPT-2 {other_count:,}\n")
    print(
        "| text before | linear | softmax | native | in bf16 | in int8 | GPT-2 dynamic | GPT-2 static "
        "| ratio | in bf16 | in int8 |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    rows = []
    for length in lengths:
        steps = (WARM + tokens) * (rounds + 1)
        session = filled(linear, length)
        writers = {"linear": ours_at(linear, session), "softmax": ours_at(softmax, filled(softmax, length))}
        writers |= {name: ours_at(model, session) for name, model in native_steps.items()}
        if other is not None:
            writers["GPT-2 dynamic"] = gpt2_at(other, length, False, steps)
            writers["GPT-2 static"] = gpt2_at(other, length, True, steps)
        speed = {name: 1 / taken for name, taken in seconds(writers, tokens, rounds, threads).items()}
        best = max((value for name, value in speed.items() if name.startswith("GPT-2")), default=float("nan"))
        ratios = {name.replace("native", "ratio"): speed[name] / best for name in native_steps}
        rows.append({"shape": shape, "length": length, **speed, **ratios})
        cells = [f"{value:,.0f}" for value in speed.values()] + ["-"] * (7 - len(speed))
        cells += [f"{value:.1f}" for value in ratios.values()]
        print(f"| {length:,} | {' | '.join(cells)} |", flush=True)
    return rows


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Tokens per second against the length of the text before, both on log scales."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    figure, panels = pyplot.subplots(1, len(shapes), figsize=(5 * len(shapes), 4), squeeze=False)
    marks = {
        "native, int8": "P-",
        "native, bf16": "*-",
        "native": "D-",
        "linear": "o-",
        "softmax": "s--",
        "GPT-2 dynamic": "^:",
        "GPT-2 static": "v-.",
    }
    for panel, shape in zip(panels[0], shapes, strict=True):
        own = [row for row in rows if row["shape"] == shape]
        for name, mark in marks.items():
            if name in own[0]:
                panel.plot([row["length"] for row in own], [row[name] for row in own], mark, label=name)
        panel.set(xscale="log", yscale="log", xlabel="tokens before", ylabel="tokens/s", title=shape)
        panel.set_xticks([row["length"] for row in own], [f"{row['length']:,}" for row in own])
        marked = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000]
        panel.set_yticks(marked, [f"{speed:,}" for speed in marked])
        speeds = [row[name] for row in own for name in marks if name in row]
        panel.set_ylim(min(speeds) / 1.3, max(speeds) * 1.3)
        panel.minorticks_off()
        panel.grid(alpha=0.3)
        panel.legend(loc="lower left", fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Print a table for each shape of model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS))
    parser.add_argument("--tokens", type=int, default=16, help="in each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {options.threads} threads")
    work = (options.lengths, options.tokens, options.rounds, options.threads)
    rows = [row for shape in options.shapes for row in measure(shape, *work)]
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    if options.plot:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
