"""A model of an alphabet, in use: written, scored, evaluated and served, with what its alphabet lacks refused."""

import json
from pathlib import Path

import pytest
from commands import lmlong as command
from interop.exported import write_run
from serving.servers import served

import lmlong
from lmlong.data.tokenizers.characters import CharacterTokenizer

PROMPT = "GATTACA" * 5


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "genome"
    write_run(folder, CharacterTokenizer("ACGT"))
    return folder


def test_it_is_served_and_other_characters_are_the_fault_of_the_client(run: Path) -> None:
    trained = lmlong.load(run)
    assert sum(base.bytes for base in lmlong.score(trained, PROMPT, by="token")) == 35
    with served(trained, rows=2) as server:
        expected = "".join(trained.stream(PROMPT, seed=1, max_tokens=30))
        assert server.texts(prompt=PROMPT, seed=1, max_tokens=30) == [expected] and set(expected) <= set("ACGT")
        for path, body in (("/v1/completions", {"prompt": "GATTAXA"}), ("/v1/score", {"text": "GATTAXA"})):
            refused = server.post(path, **body)
            message = "character 6: 'X' (U+0058) is not in the alphabet of this model."
            assert refused.status_code == 400 and refused.json()["error"]["message"] == message
        scored = server.post("/v1/score", text=PROMPT).json()
        assert (scored["bytes"], scored["tokens"]) == (35, 36)


def test_the_commands_read_it(run: Path, tmp_path: Path) -> None:
    text = tmp_path / "sequence.txt"
    text.write_text("GATTACA" * 200)
    measure = ("eval", run, "--data", text, "--lengths", "16,64", "--by", "protocol", "--json", "-")
    done = command(*measure)
    assert done.returncode == 0 and json.loads(done.stdout)
    done = command("generate", run, "--prompt", "GATTAXA")
    assert done.returncode != 0 and "character 6: 'X' (U+0058) is not in the alphabet" in done.stderr
    text.write_text("GATTACA\nGATTACA" * 200)
    done = command(*measure)
    assert done.returncode != 0 and "sequence.txt: line 1, character 8" in done.stderr
