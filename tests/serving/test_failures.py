"""An error of any kind ends the request that it belongs to, and a server that can do no more work reports it."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from interop import tiny_llama
from interop.tiny_llama import CONFIG, write_folder
from serving.schedulers import tiny
from serving.servers import CHAT, COMPLETIONS, SCORE, SESSIONS, Served, error_of, refused, served

import lmlong
from lmlong.errors import UsageError
from lmlong.interop.importing import import_model

PANICS = "x" * 5000
"""A text that the regular expression below takes too many steps for: the library `tokenizers` panics."""

CALLS: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": PANICS, "max_tokens": 2},
    CHAT: {"messages": [{"role": "user", "content": PANICS}], "max_tokens": 2},
    SCORE: {"text": PANICS},
    SESSIONS: {"text": PANICS},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("panic")
    imported = write_folder(folder / "llama", CONFIG, tiny_llama.weights(CONFIG))
    spec = json.loads((imported / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}
    spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, spec["pre_tokenizer"]]}
    (imported / "tokenizer.json").write_text(json.dumps(spec))
    import_model(imported, folder / "run")
    with served(lmlong.load(folder / "run")) as server:
        yield server


def test_a_panic_of_a_library_ends_one_request(
    server: Served, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    for path, body in CALLS.items():
        answer = server.post(path, **body)
        assert answer.status_code == 400 and "cannot encode this text" in error_of(answer)["message"]
        assert PANICS[:100] not in caplog.text + answer.text
        assert "panicked" in capfd.readouterr().err  # by Rust's own words
        assert server.client.get("/ready").status_code == 200
    assert server.texts(prompt="ab", max_tokens=2)
    assert server.post(SCORE, text="ab").status_code == 200
    with pytest.raises(UsageError, match="The tokenizer of this model cannot encode this text"):
        server.service.trained.read(PANICS)


def test_a_server_whose_scheduler_has_ended_is_not_ready(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise GeneratorExit(PANICS)

    with served(tiny()) as server:
        assert server.client.get("/ready").status_code == 200
        monkeypatch.setattr(server.service.scheduler, "_admit", fail)
        for _ in range(2):  # the one that it fails with, and one that comes later
            assert refused(server.post(COMPLETIONS, prompt="a", max_tokens=1)) == (503, "not_ready")
        answer = server.client.get("/ready")
        assert answer.status_code == 503 and "Restart the server" in error_of(answer)["message"]
        assert server.service.scheduler.active == server.service.scheduler.queued == 0
    assert "GeneratorExit" in caplog.text and PANICS[:100] not in caplog.text


def test_a_server_whose_worker_has_ended_is_not_ready() -> None:
    with served(tiny()) as server:
        assert "lmlong-uploads" in [worker.name for worker in server.service.workers]
        for worker in server.service.workers:
            worker._pool.submit(int).result()
            assert server.client.get("/ready").status_code == 200
            worker._pool.shutdown()
            answer = server.client.get("/ready")
            assert answer.status_code == 503 and worker.name in error_of(answer)["message"]
            worker._thread = None
