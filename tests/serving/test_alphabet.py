"""A model of an alphabet, in use: written, scored, evaluated and served, with what its alphabet lacks refused."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from interop.exported import write_run
from serving.servers import served

import lmlong
from lmlong.cli.main import lmlong as command
from lmlong.data.tokenizers.characters import CharacterTokenizer

PROMPT = "GATTACA" * 5


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "genome"
    write_run(folder, CharacterTokenizer("ACGT"))
    return folder


def test_it_is_served_and_other_characters_are_the_fault_of_the_client(run: Path) -> None:
    trained = lmlong.load(run)
    with served(trained, rows=2) as server:
        options = {"seed": 1, "max_tokens": 30}
        assert server.texts(prompt=PROMPT, **options) == ["".join(trained.stream(PROMPT, **options))]
        for path, body in (("/v1/completions", {"prompt": "GATTAXA"}), ("/v1/score", {"text": "GATTAXA"})):
            refused = server.post(path, **body)
            assert refused.status_code == 400
            assert (
                refused.json()["error"]["message"] == "character 6: 'X' (U+0058) is not in the alphabet of this model."
            )
        scored = server.post("/v1/score", text=PROMPT).json()
        assert (scored["bytes"], scored["tokens"]) == (35, 36)


def test_texts_of_its_letters_come_back_and_are_scored_base_by_base(run: Path) -> None:
    trained = lmlong.load(run)
    assert set("".join(trained.stream(PROMPT, seed=2, max_tokens=50))) <= set("ACGT")
    whole = trained.read(PROMPT)
    assert whole.unread.pending.shape[1] == 0 and int(whole.total) == 36
    assert sum(base.bytes for base in lmlong.score(trained, PROMPT, by="token")) == 35


def invoke(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(command, words)
    return result.exit_code, f"{result.stdout}{result.stderr}{result.exception or ''}"


def test_the_commands_read_it(run: Path, tmp_path: Path) -> None:
    text = tmp_path / "sequence.txt"
    text.write_text("GATTACA" * 200)
    code, told = invoke("eval", str(run), "--data", str(text), "--lengths", "16,64", "--by", "protocol", "--json", "-")
    assert code == 0 and json.loads(told[told.index("{") : told.rindex("}") + 1])
    code, told = invoke("generate", str(run), "--prompt", "GATTAXA")
    assert code != 0 and "character 6: 'X' (U+0058) is not in the alphabet" in told
    text.write_text("GATTACA\nGATTACA" * 200)
    code, told = invoke("eval", str(run), "--data", str(text), "--lengths", "16,64")
    assert code != 0 and "sequence.txt: line 1, character 8" in told
