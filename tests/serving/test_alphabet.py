"""A served model of an alphabet, which refuses other characters."""

from serving.schedulers import tiny
from serving.servers import served

import lmlong
from lmlong.data.tokenizers.characters import CharacterTokenizer

PROMPT = "GATTACA" * 5


def test_it_is_served_and_other_characters_are_the_fault_of_the_client() -> None:
    trained = tiny(tokenizer=CharacterTokenizer("ACGT"))
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
