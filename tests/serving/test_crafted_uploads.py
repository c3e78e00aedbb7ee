"""Uploaded states that anybody may have made: refused by a 400, or taken; no other text notices."""

from pathlib import Path
from random import Random

import pytest
from grids import every_nth
from inference.crafted_states import craft, prepare
from serving.servers import served

SESSIONS = "/v1/sessions"
STATE_FILE = {"Content-Type": "application/vnd.lmlong.state"}
OPTIONS = {"prompt": "and so", "max_tokens": 5, "repetition_penalty": 1.2}


@every_nth(3, pytest.mark.parametrize("kind", ["ngram", "softmax", "parallel"]))
def test_crafted_uploads(tmp_path: Path, kind: str) -> None:
    case, file, taken = prepare(tmp_path, [kind])[kind], tmp_path / "crafted.state", 0
    with served(case.model) as server:
        expected = server.texts(seed=0, **OPTIONS)
        for number in range(40):
            changed = craft(Random(number), case, file)
            upload = server.client.post(SESSIONS, content=file.read_bytes(), headers=STATE_FILE)
            assert upload.status_code in (201, 400), f"{number}: {changed}: {upload.text}"
            if upload.status_code == 201:
                taken += 1
                answer = server.post("/v1/completions", session=upload.json()["id"], **OPTIONS)
                assert answer.status_code in (200, 400), f"{number}: {changed}: {answer.text}"
        assert 0 < taken < 40
        assert server.texts(seed=0, **OPTIONS) == expected
        assert server.client.get("/ready").status_code == 200
