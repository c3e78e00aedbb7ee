"""What may be asked of an encoder's run, and what is refused with the reason."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import lmlong
from machine import new_cache
from models import write_run

from lmlong.data.data_module import DATA_MODULES
from lmlong.data.token_dataset import prepare
from lmlong.evaluation.masked import measure_masked
from lmlong.inference.loading import open_run
from lmlong.recipe import Recipe, file

RECIPE = """
objective: masked
text:
  sources: [{{kind: files, paths: [{train}]}}]
  validation: {{sources: [{{kind: files, paths: [{validation}]}}]}}
  tokenizer: {{kind: bytes}}
  sequence_length: 32
  rows: {rows}
model:
  width: 16
  layers: 2
  heads: 2
  attention: {{kind: linformer, linformer: {{projected: 4}}}}
  downsample: {downsample}
training: {{steps: 3, batch_size: 3}}
"""


@pytest.fixture(params=["windows", "documents", "documents, in blocks"])
def encoder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder with a checkpoint of a tiny encoder of bytes."""
    monkeypatch.setenv("LMLONG_CACHE", str(new_cache(tmp_path)))
    (tmp_path / "train.txt").write_text("a book of no great length " * 20)
    for number in range(5):
        (tmp_path / f"held-{number}.txt").write_text("what was held out of it " * (number + 1))
    places = {"train": tmp_path / "train.txt", "validation": tmp_path / "held-*.txt"}
    rows, *in_blocks = request.param.split(", ")
    downsample = "{factor: 5, layers: 1, kind: conv}" if in_blocks else "null"
    (tmp_path / "tiny.yaml").write_text(RECIPE.format(rows=rows, downsample=downsample, **places))
    write_run(tmp_path / "run", chosen=file.load(str(tmp_path / "tiny.yaml")), step=3, deviation=0.3)
    return tmp_path / "run"


def test_the_perplexity_is_that_of_the_hidden_tokens_of_validation(encoder: Path) -> None:
    trained = open_run(encoder, "cpu")
    recipe: Recipe = trained.recipe
    nats, all_hidden = [], []
    for batch in DATA_MODULES["masked"](recipe, prepare(recipe.text, trained.tokenizer)).validation():
        tokens, targets, padding = map(torch.from_numpy, batch)
        for row in range(len(tokens)):
            seen = ~padding[row]
            logits = trained.model.logits(trained.model(tokens[row : row + 1, seen])[0]).detach().double()
            hidden = targets[row, seen] != -100
            lost = torch.nn.functional.cross_entropy(logits[0, hidden], targets[row, seen][hidden], reduction="sum")
            nats.append(float(lost))
            all_hidden += targets[row, seen][hidden].tolist()
    report = measure_masked("tiny", trained)
    assert report.sums.totals.nats == pytest.approx(sum(nats), rel=1e-5)
    assert report.sums.totals.tokens == len(all_hidden)
    letters = (encoder.parent / "train.txt").read_text()
    shares = [(letters.count(chr(token)) + 1) / (len(letters) + 256) for token in all_hidden]
    assert report.unigram == pytest.approx(math.exp(-np.log(shares).mean()))
    assert report.error == pytest.approx(report.sums.nats_error * math.exp(sum(nats) / len(all_hidden)), rel=1e-4)
    if recipe.text.rows == "documents":
        assert report.sums.documents == 5
    else:
        assert report.sums.nats == pytest.approx(nats, rel=1e-5)


@pytest.mark.parametrize("encoder", ["windows"], indirect=True)
def test_eval_shows_it_as_a_line_and_as_json(encoder: Path, tmp_path: Path) -> None:
    done = lmlong("eval", encoder, "--json", tmp_path / "found.json")
    (found,) = json.loads((tmp_path / "found.json").read_text())["runs"]
    assert found["objective"] == "masked"
    assert found["perplexity"] == pytest.approx(math.exp(found["nats_per_token"]))
    title, columns, line = done.stdout.splitlines()
    assert title == "prediction of hidden tokens, precision 32" and len(columns) <= 80
    assert f"{found['perplexity']:.3f} " in line and f" {found['unigram_perplexity']:.3f} " in line
    assert f"{found['hidden_tokens']:,}" in line
    assert len(line.removesuffix(found["name"])) <= 80
    done = lmlong("eval", encoder, encoder, "--data", tmp_path / "train.txt", "--tokens", 64, "--json", "-")
    runs = json.loads(done.stdout)["runs"]
    assert [(run["hidden_share"], run["unigram_perplexity"]) for run in runs] == [(0.15, None), (0.15, None)]


@pytest.mark.parametrize("encoder", ["windows"], indirect=True)
def test_options_and_commands_that_need_a_past_are_refused(encoder: Path, run: Path, tmp_path: Path) -> None:
    for option in ("--lengths 16", "--by state", "--plot x.png", "--weights bf16", "--targets 9"):
        done = lmlong("eval", encoder, *option.split())
        why = "reads both sides of each token at once" if "--by" in option else "not to encoders. Leave it out."
        assert (done.returncode, done.stderr.startswith(f"error: {option.split()[0]}: ")) == (2, True)
        assert why in done.stderr
    for words in (
        ("generate", encoder, "--prompt", "x"),
        ("state", "build", encoder, tmp_path / "train.txt", "-o", "x.state"),
        ("check", encoder),
        ("eval", encoder, "--by", "recall"),
    ):
        done = lmlong(*words)
        assert done.returncode == 2
        pattern = r"an encoder \(objective: masked\) cannot continue text .* lmlong eval, .* objective: causal"
        assert re.search(pattern, done.stderr)
    done = lmlong("eval", encoder, run)
    assert (done.returncode, "Name runs of one objective" in done.stderr) == (2, True)


@pytest.mark.parametrize("encoder", ["documents, in blocks"], indirect=True)
def test_info_describes_an_encoder(encoder: Path) -> None:
    facts = json.loads(lmlong("info", encoder, "--json").stdout)
    assert (facts["objective"], facts["step"]) == ("masked", 3)
    assert facts["attention by layer"] == ["linformer", "linformer"] and "state bytes" not in facts
    assert facts["tokens read as one by layer"] == [5, 1]
