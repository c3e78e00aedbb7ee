"""Random requests as no client should send them: damaged bodies, and bytes that are hardly HTTP."""

import json
import random
from collections.abc import Iterator
from typing import Any

ENDLESS = {"prompt": "a", "max_tokens": 10**6, "temperature": 0, "stream": True}
"""A text that takes longer than any test: the likeliest tokens go round and round."""

VALID: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/v1/score": {"text": "a"},
    "/v1/sessions": {"text": "a"},
    "/v1/sessions/0123456789abcdef01234567/append": {"text": "a"},
}

KEYS = ["prompt", "max_tokens", "n", "stop", "seed", "temperature", "top_p", "top_k", "min_p", "logprobs", "stream"]
KEYS += ["messages", "text"]
KEYS += ["stream_options", "repetition_penalty", "loop_penalty", "model", "\ud800", "\0", "x" * 5000, "best_of"]

VALUES: list[Any] = [None, True, 0, -1, 1, 3, 1e308, 10**40, "", "a", "\ud800", "a\0", [], [[]], {}, {"a": {}}, "stop"]
VALUES += [["a", "\udfff"], [1], ["b"] * 40, float("nan"), float("-inf"), -0.0, 5e-324, "\u20ac" * 9, [None], [{}]]
VALUES += [[{"role": "user", "content": "a"}], [{"role": 3}], {"include_usage": True}, [["a"]]]

RAW = [b"", b"{", b"[" * 100_000, b'{"prompt":' * 50_000, b"\xff\xfe", b"\x00", b'{"prompt": "\\ud800"}', b"1" * 10_000]
RAW += [b'{"prompt": 1e999}', b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", b"\xef\xbb\xbf{}", b"null", b'"a"']
RAW += [b'{"prompt": [' + b"{}," * 70_000 + b"{}]}", b"{" + b",".join(b'"%d":1' % key for key in range(30_000)) + b"}"]
RAW += [b'{"prompt": NaN}', b'{"prompt": "\x01"}', b'{"prompt": "\xed\xa0\x80"}', b'{"a": 1, "a": 2}']


def requests(draw: random.Random) -> Iterator[tuple[str, bytes]]:
    """Iterate over paths and bodies, most of which are damaged."""
    while True:
        path = draw.choice(list(VALID))
        chosen = draw.sample(KEYS, draw.randint(0, 2))
        body = {**VALID[path], **{key: draw.choice(VALUES) for key in chosen}}
        text = bytearray(json.dumps(body).encode())
        kind = draw.randrange(5)
        if kind == 0:
            yield path, draw.choice(RAW)
        elif kind == 1:
            for _ in range(draw.randint(1, 4)):
                text[draw.randrange(len(text))] = draw.randrange(256)
            yield path, bytes(text)
        elif kind == 2:
            yield path, bytes(text[: draw.randrange(len(text))])
        else:
            yield path, bytes(text)


LINES = [b"GET /v1/models HTTP/1.1", b"POST /v1/completions HTTP/1.1", b"POST /v1/score HTTP/1.1"]
LINES += [b"GET /v1/models HTTP/1.0", b"GET /v1/models HTTP/9.9", b"GET /v1/models", b"get /health HTTP/1.1", b"\r\n"]
LINES += [b"PRI * HTTP/2.0", b"CONNECT a:1 HTTP/1.1", b"OPTIONS * HTTP/1.1", b"TRACE / HTTP/1.1", b"A" * 70_000]
LINES += [b"GET http://localhost/health HTTP/1.1", b"GET /../../etc/passwd HTTP/1.1", b"GET /v1/models/%00%ff HTTP/1.1"]
LINES += [
    b"GET /v1/models/\xff\xfe HTTP/1.1",
    b"GET /" + b"a/" * 9000 + b" HTTP/1.1",
    b"\x00\x01\x02",
    b" GET / HTTP/1.1",
]
LINES += [
    b"GET  HTTP/1.1",
    b"HEAD /health HTTP/1.1",
    b"DELETE /v1/completions HTTP/1.1",
    b"POST /v1/models/\r HTTP/1.1",
]

HEADERS = [b"Host: localhost", b"Host: localhost", b"Host: evil.example", b"Host:", b"Host: [::1", b"Host: \xff"]
HEADERS += [b"Content-Type: application/json", b"Content-Type: application/json; charset=\xff", b"Content-Type:"]
HEADERS += [b"Content-Type: application/octet-stream", b"Content-Type: application/vnd.lmlong.state"]
HEADERS += [b"Content-Type: application/epub+zip", b"Content-Type: text/html"]
HEADERS += [b"Content-Length: 15", b"Content-Length: -1", b"Content-Length: 1e3", b"Content-Length: " + b"9" * 5000]
HEADERS += [
    b"Content-Length: 15, 16",
    b"Content-Length: \xc2\xb2",
    b"Transfer-Encoding: chunked",
    b"Content-Encoding: gzip",
]
HEADERS += [b"Transfer-Encoding: gzip, chunked", b"Transfer-Encoding: x", b"Expect: 100-continue", b"Connection: close"]
HEADERS += [b"Connection: Upgrade\r\nUpgrade: websocket", b"Upgrade: h2c", b"Authorization: Bearer " + b"\xe9" * 99]
HEADERS += [b"X: " + b"a" * 70_000, b"no colon", b": no name", b" folded: a", b"N\x00L: a", b"A: \x00", b"\xff: a"]

BODIES = [b'{"prompt": "a"}', b'{"prompt": "a"', b"", b"f\r\n" + b'{"prompt": "a"}' + b"\r\n0\r\n\r\n", b"-1\r\n\r\n"]
BODIES += [b"f" * 17 + b"\r\na", b"zz\r\n", b"0\r\nHost: evil\r\n\r\n", b"f;a=" + b"b" * 9000 + b"\r\n", b"\x00" * 99]


def connections(draw: random.Random) -> Iterator[bytes]:
    """Iterate over bytes that a connection may bring, of which few are a request."""
    valid = b"\r\n".join(
        [LINES[1], HEADERS[0], b"Content-Type: application/json", b"Content-Length: 15", b"", BODIES[0]]
    )
    while True:
        kind = draw.randrange(6)
        if kind == 0:
            yield draw.choice([b"\x16\x03\x01\x02\x00", b""]) + draw.randbytes(draw.randint(1, 2000))
        elif kind == 1:
            changed = bytearray(valid)
            for _ in range(draw.randint(1, 5)):
                changed[draw.randrange(len(changed))] = draw.randrange(256)
            yield bytes(changed)
        elif kind == 2:
            yield valid[: draw.randrange(1, len(valid))]
        elif kind == 3:
            yield valid * draw.randint(2, 20) + valid[: draw.randrange(len(valid))]
        else:
            headers = draw.choices(HEADERS, k=draw.choice([0, 1, 2, 3, 4, 200]))
            host = [HEADERS[0]] if draw.random() < 0.7 else []
            newline = draw.choice([b"\r\n", b"\r\n", b"\r\n", b"\n", b"\r"])
            yield newline.join([draw.choice(LINES), *host, *headers, b"", draw.choice(BODIES)])
