"""Mistakes of a user: each is one message with its remedy and exit code, and nothing is written or changed."""

import re
import shlex
from pathlib import Path

import pytest

from .conftest import Command

PIPE = "cannot be read[ (:]*a pipe or a device, not a file"
DASHES = "Options of a recipe have no dashes: "
ONE_STATE = "--save-state: saves the state of one text"
WHOLE = r"page\.html: is converted to text as a whole"
MISTAKES: list[tuple[str, str]] = [
    ("recip", r"No such command 'recip'\. Did you mean 'recipe'\?"),
    ("recipe list --jsn", "No such option"),
    ("train quickstart --steps 100", f"{DASHES}training.steps=100"),
    ("train quickstart --learning-rate=3", f"{DASHES}training.learning_rate=3"),
    ("recipe check quickstart --width", f"{DASHES}model.width=VALUE"),
    ("train quickstart --device cpu", f"{DASHES}device=cpu"),
    ("train quickstart --overwrit", r"Did you mean '--overwrite'\?"),
    ("eval x --steps 3", r"No such option '--steps'\."),
    ("tokenizer x --help", "^error: tokenizer: .*Use lmlong data train-tokenizer, or lmlong data tokenizer-info.$"),
    ("probe x --help", "^error: probe: has another name now. Use lmlong eval --by recall.$"),
    ("spectrum x --help", "^error: spectrum: has another name now. Use lmlong eval --by spectrum.$"),
    ("lm-eval x --help", "^error: lm-eval: has another name now. Use lmlong eval --tasks.$"),
    ("recipe copy quickstart mine.yaml", r"^error: mine.yaml: exists already\. Use another name, or remove it first\."),
    ("recipe copy quickstart no/x.yaml", "^error: no/x.yaml: cannot be written: No such file or directory"),
    ("recipe options sequence_lenght", r"lenght: no option matches\. Did you mean 'sequence_length'\?"),
    ("data info --json mine.yaml", r"does not end in \.json"),
    ("data info --json quickstart", r"does not end in \.json"),
    ("train mine.yaml model.widht=8", r"model.widht=8: unknown key\. Did you mean 'width'\?"),
    ("train mine.yaml text.sources.0.paths=latin.txt", "latin.txt: byte 3 is not UTF-8"),
    ("train mine.yaml device=cuda", r"device: cuda was asked for, .* finds no GPU here\. Use auto or cpu\."),
    ("train mine.yaml --resume nowhere", r"nowhere: no such run or checkpoint\."),
    ("train mine.yaml training.learning_rate=1e300", r"^error: training.learning_rate=1e300: .*at most 1e\+30"),
    ("train mine.yaml model.attention.window=9223372036854775807", "^error: model.attention.window.*most 2147483648"),
    ("train mine.yaml model.width=131072 model.layers=100", "^error: model: training takes.*most of it for the model"),
    ("train mine.yaml training.batch_size=1000000 model.width=10240", "^error: model: .*most of it for a batch"),
    ("convert run --to mine.yaml --resume auto", "--resume of convert takes no value"),
    (
        "data info mine.yaml text.sources.0.paths=newlines.txt "
        "text.tokenizer.kind=sentencepiece text.tokenizer.vocabulary=300",
        "^error: text.tokenizer: sentencepiece cannot train on this text",
    ),
    ("eval run --lengths 16,9999999g", "is more than 1024g tokens, which no text has"),
    ("eval run --tokens 99999999999999999999999", "is more than 1024g tokens, which no text has"),
    ("eval run --lengths 8 --min-documents 1 --by position --json /proc/x.json", "^error: /proc/x.json: "),
    ("generate run --prompts none", r"none: cannot be read \(No such file or directory\)\."),
    ("generate run --prompts second.jsonl", "second.jsonl:2: not a prompt"),
    ("generate run --prompts plain.jsonl", "plain.jsonl:1: not a prompt"),
    ("generate run --prompts empty.jsonl", "contains no prompt"),
    ("generate run --prompt a --prompts good.jsonl", "mutually exclusive"),
    ("generate run --prompts good.jsonl --save-state a.state", ONE_STATE),
    ("generate run --samples 2 --save-state a.state", ONE_STATE),
    ("score run book.txt --field x", "--by record"),
    ("score run book.txt --save-state missing/s", "folder is missing"),
    ("score run --follow", "Name one"),
    ("score run nothing.txt", "cannot be read"),
    ("score run book.txt --plot missing/x.png", "folder is missing"),
    ("score run book.txt --plot x.txt", "png"),
    ("score run image.png", "image.png: .*byte 8 is NUL"),
    ("score run zipped.txt", "zipped.txt: .*is NUL"),
    *((f"{command} several.zip", "several.zip: .*holds several texts") for command in ("score run", "state build run")),
    *((f"{command} old.doc", r"old\.doc: .*save it as \.docx") for command in ("score run", "state build run")),
    *((f"{command} damaged.gz", r"damaged\.gz: .*damaged") for command in ("score run", "state build run")),
    *((f"score run page.html {option}", WHOLE) for option in ("--follow", "--save-state s")),
    ("score run https://a.org/b.txt", "https://a.org/b.txt: addresses are not read. Download the file"),
    ("recipe check bare.yaml", "'two_gates' is not one of linear, delta, "),
    ("train bare.yaml --plugin gone.py", "gone.py: cannot be read: No such file"),
    ("recipe check quickstart 'plugins=[gone.py]'", r"plugins=\[gone.py\]: plugins.0: "),
    ("recipe check gates.yaml model.attention.two_gates.x=1", r"unknown key\. Known here: memory\."),
    ("recipe check gates.yaml objective=masked", "two_gates has no encoder form"),
    ("info --plugin two_gate", "two_gate: no installed package has an entry point of this name"),
    ("bench", r"^error: Missing argument '\{.*\}'\. Choose from: attention, train, generate: lmlong bench --help$"),
    ("recipe check mine.yaml text.sources=book.txt", r"Write 'text\.sources\.0\.paths=book\.txt'\."),
    ("train quickstart --block-size 9", f"{DASHES}text.sequence_length=9"),
    ("train run/recipe.yaml --resume auto --out wrong", "wrong is not a run to resume. .* --resume auto"),
    ("train mine.yaml --out run", r"^error: run: exists\. .*Resume it by: lmlong train run/recipe.yaml --resume auto"),
    ("check", "RUN and --plugin are missing"),
    ("state info pipe", f"^error: pipe: {PIPE}"),
    ("state build run book.txt -o new.state --load-state pipe", f"^error: pipe: {PIPE}"),
    ("generate run --load-state pipe", f"^error: pipe: {PIPE}"),
    ("score run book.txt --load-state pipe", f"^error: pipe: {PIPE}"),
    ("export run --to hf --out exported --evaluation pipe", f"^error: pipe: {PIPE}"),
    ("data tokenizer-info pipe", f"^error: pipe: {PIPE}"),
    ("import pipe --out imported", f"^error: pipe: {PIPE}"),
    ("check --plugin pipe.py", rf"^error: pipe\.py: {PIPE}"),
]


def contents(place: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() if path.is_file() else b"" for path in place.iterdir()}


@pytest.mark.parametrize(("line", "message"), MISTAKES)
def test_mistake_is_one_message(lmlong: Command, place: Path, line: str, message: str) -> None:
    before, words = contents(place), shlex.split(line)
    if words[0] == "train" and "--out" not in words:
        words += ["--out", "wrong"]
    if words[:2] == ["state", "build"] and "-o" not in words:
        words += ["-o", "wrong.state"]
    code, output, told = lmlong(*words)
    assert (code, output) == (4 if "nowhere" in line else 2, ""), told
    assert re.search(message, told, re.MULTILINE), told
    assert "Traceback" not in told and ("dashes" in message) == ("dashes" in told)
    assert contents(place) == before
