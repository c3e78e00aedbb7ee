"""Read a text in lmlong and decode after some lengths: python lmlong_process.py WORK.json WEIGHTS

Prints a JSON object a line, as llama_cpp.mjs does.
"""

import json
import sys
import time
from pathlib import Path

import lmlong
from lmlong.inference.session import Session, append_token, next_logits, prefill
from lmlong.native.threads import set_threads


def main() -> None:
    work = json.loads(Path(sys.argv[1]).read_text())
    set_threads(1)
    trained = lmlong.load(work["run"], "cpu", weights=sys.argv[2])  # type: ignore[arg-type]
    trained.use_fast_engine()
    print(json.dumps({"version": lmlong.__version__}), flush=True)
    session: Session | None = None
    read, tokens = 0, work["tokens"]
    for length in work["lengths"]:
        begun = clock()
        session = prefill(trained.model, [tokens[read:length]], session)
        prefilled, count = since(begun), length - 1 - max(0, read - 1)
        read, predicted = length + work["decoded"], []
        begun = clock()
        for token in tokens[length:read]:
            logits, state = next_logits(trained.model, session)
            predicted.append(int(logits.argmax(-1)))
            session = append_token(session, state, token)
        line = {"length": length, "read": count, "prefill": prefilled, "decode": since(begun), "predicted": predicted}
        print(json.dumps(line), flush=True)


def clock() -> dict[str, float]:
    return {"cpu": time.process_time(), "wall": time.perf_counter()}


def since(begun: dict[str, float]) -> dict[str, float]:
    return {name: now - begun[name] for name, now in clock().items()}


if __name__ == "__main__":
    main()
