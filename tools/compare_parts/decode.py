"""lmlong beside llama.cpp: prefill and decoding of the same model, after the same tokens, on one thread."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, get_args

from baseline_parts.machine import machine

import lmlong
from lmlong.errors import LmlongError, UsageError
from lmlong.interop.importing import import_model
from lmlong.model.quantization import Weights
from lmlong.report.progress import Progress
from lmlong.report.table import Column, format_table, plural

from . import node_llama_cpp

PARTS = Path(__file__).parent
FORMATS: tuple[str, ...] = get_args(Weights)
LLAMA_CPP = "llama.cpp"
PHASES = ("decode", "prefill")


class Measured(NamedTuple):
    """What one process measured after one length of the text before."""

    candidate: str
    length: int
    read: int  # tokens of the prefill since the length before
    prefill: dict[str, float]  # seconds, of the processor (cpu) and of the clock (wall)
    decode: dict[str, float]
    predicted: list[int]  # the most probable token at each decode step


class Comparison(NamedTuple):
    model: str
    processor: str
    llama_cpp: dict[str, str]  # its version, library and instructions
    decoded: int  # tokens after each length
    rounds: int
    results: list[Measured]

    def speeds(self, phase: str, candidate: str, length: int) -> list[float]:
        """Return tokens per second of processor time, by round."""
        results = [each for each in self.results if (each.candidate, each.length) == (candidate, length)]
        if phase == "decode":
            return [self.decoded / each.decode["cpu"] for each in results]
        return [each.read / each.prefill["cpu"] for each in results]

    def ratios(self, phase: str, candidate: str, length: int) -> list[float]:
        """Return how many times as fast as llama.cpp a candidate was, by round."""
        pairs = (self.speeds(phase, each, length) for each in (candidate, LLAMA_CPP))
        return [speed / llama_cpp for speed, llama_cpp in zip(*pairs, strict=True)]

    def agreement(self, candidate: str) -> float:
        """Return the share of tokens that a candidate predicts as llama.cpp does, in the first round."""
        same, count = 0, 0
        for length in lengths_of(self):
            first = {each.candidate: each for each in reversed(self.results) if each.length == length}
            pairs = zip(first[candidate].predicted, first[LLAMA_CPP].predicted, strict=True)
            same += sum(a == b for a, b in pairs)
            count += self.decoded
        return same / count


def compare(
    model: Path, packages: Path, formats: Sequence[str], lengths: Sequence[int], decoded: int, rounds: int
) -> Comparison:
    """Measure llama.cpp and lmlong with the weights in several formats in turn, each in a process of its own."""
    if not model.is_file():
        raise UsageError(f"{model}: no such file. tools/pretrained fetches one.")
    lengths = sorted(lengths)
    if lengths[0] < 2 or any(b - a < decoded + 2 for a, b in pairwise(lengths)):
        raise UsageError(f"--lengths: {lengths} are nearer to each other than --tokens {decoded}. Spread them.")
    packages = packages.resolve()
    node_llama_cpp.install(packages)
    run = packages / f"{model.stem}.lmlong"
    if not run.exists():
        import_model(model, run)
    work = {
        **{"model": str(model.resolve()), "run": str(run), "packages": str(packages)},
        **{"tokens": text_tokens(run, lengths[-1] + decoded), "lengths": lengths, "decoded": decoded},
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "work.json"
        file.write_text(json.dumps(work))
        commands = {LLAMA_CPP: ["node", str(PARTS / "llama_cpp.mjs"), str(file)]}
        for name in formats:
            commands[name] = [sys.executable, str(PARTS / "lmlong_process.py"), str(file), name]
        llama_cpp, results = measure(commands, rounds, lengths[-1])
    done = len(results) // (len(commands) * len(lengths))
    return Comparison(model.name, machine()["processor"], llama_cpp, decoded, done, results)


def measure(commands: dict[str, list[str]], rounds: int, longest: int) -> tuple[dict[str, str], list[Measured]]:
    """Run the command of each candidate in each round. Return what llama.cpp told of itself, and the results. Ctrl-C
    ends with the rounds that are complete."""
    llama_cpp: dict[str, str] = {}
    complete: list[Measured] = []
    with Progress("decode", rounds * len(commands) * longest, "tokens") as progress:
        try:
            for number in range(rounds):
                results = []
                for candidate, command in commands.items():
                    progress.begin(f"round {number + 1}, {candidate}")
                    lines = run_process(command)
                    started = next(lines)
                    llama_cpp = started if candidate == LLAMA_CPP else llama_cpp
                    reached = 0
                    for line in lines:
                        results.append(Measured(candidate, **line))
                        progress.update(line["length"] - reached)
                        reached = line["length"]
                complete += results
        except KeyboardInterrupt:
            if not complete:
                raise
    return llama_cpp, complete


def text_tokens(run: Path, count: int) -> list[int]:
    """Return the first tokens of Python's standard library, from the module `argparse` on."""
    tokenizer = lmlong.load(run, "cpu").tokenizer
    library = Path(os.__file__).parent
    tokens = [tokenizer.bos]
    for path in sorted(path for path in library.glob("*.py") if path.name >= "argparse.py"):
        if len(tokens) >= count:
            break
        tokens += tokenizer.encode(path.read_text())
    return tokens[:count]


def run_process(command: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Iterate over the objects that a process prints, each on a line; one thread."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        for line in process.stdout:
            yield json.loads(line)
        errors = process.stderr.read()
    if process.returncode:
        raise LmlongError(f"{' '.join(command)} failed:\n{errors.strip()}")


def lengths_of(comparison: Comparison) -> list[int]:
    return sorted({each.length for each in comparison.results})


def candidates_of(comparison: Comparison) -> list[str]:
    return list(dict.fromkeys(each.candidate for each in comparison.results))


def table(comparison: Comparison) -> str:
    """Return the speeds, and the ratios to llama.cpp, for a terminal of 80 columns."""
    candidates = candidates_of(comparison)
    others = [name for name in candidates if name != LLAMA_CPP]
    told = comparison.llama_cpp
    lines = [
        f"{comparison.model} on {comparison.processor}, one thread",
        f"llama.cpp {told['version']}, {told['library']}, beside lmlong with weights in {', '.join(others)}",
    ]
    for phase, work in (("decode", f"decoding {comparison.decoded} tokens"), ("prefill", "reading the text before")):
        columns = [Column("after", 8, ","), *(Column(name, 12) for name in candidates)]
        rows = [
            [length, *(spread(comparison.speeds(phase, name, length)) for name in candidates)]
            for length in lengths_of(comparison)
        ]
        lines += ["", f"{work}: tokens/s of processor time, and half of the range", *format_table(columns, rows)]
        columns = [Column("after", 8, ","), Column("", 12), *(Column(name, 12) for name in others)]
        rows = [
            [length, "", *(spread(comparison.ratios(phase, name, length), ".2f") for name in others)]
            for length in lengths_of(comparison)
        ]
        lines += ["", f"{work}: times as fast as llama.cpp", *format_table(columns, rows)]
    agreement = ", ".join(f"{name} {comparison.agreement(name):.0%}" for name in others)
    lines += ["", f"tokens that are most probable in both: {agreement}"]
    lines.append(f"medians of {plural(comparison.rounds, 'round')}, in each of which all have their turn")
    return "\n".join(lines)


def spread(values: Sequence[float], form: str = ",.1f") -> str:
    """Return the median and half of the range as a share of it."""
    middle = statistics.median(values)
    return f"{middle:{form}} ±{(max(values) - min(values)) / 2 / middle:>3.0%}"


def to_json(comparison: Comparison) -> dict[str, Any]:
    """Return all figures of all rounds, and the medians."""
    medians = [
        {
            **{"candidate": name, "length": length},
            **{
                f"{phase}_tokens_per_second": statistics.median(comparison.speeds(phase, name, length))
                for phase in PHASES
            },
            **{f"{phase}_ratio": statistics.median(comparison.ratios(phase, name, length)) for phase in PHASES},
        }
        for length in lengths_of(comparison)
        for name in candidates_of(comparison)
    ]
    results = [each._asdict() for each in comparison.results]
    return {**comparison._asdict(), "lmlong": lmlong.__version__, "results": results, "medians": medians}
