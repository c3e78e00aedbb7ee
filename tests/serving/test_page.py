"""The page: what it is served with, to whom, and that it needs nothing from anywhere else. How it behaves in a browser
is in tests/interop."""

import json
import re
from collections.abc import Iterator
from html import unescape
from typing import Any

import pytest
from serving.schedulers import tiny
from serving.servers import Served, served

from lmlong.data.formats.table import MEDIA_TYPES
from lmlong.model.sampling_options import DEFAULTS, LOOP_PENALTY, MAX_TOKENS
from lmlong.serving.page import FILES, content

TEXTS = {path: content(file).decode() for path, file in FILES.items()}
SCRIPTS = {path: text for path, text in TEXTS.items() if path.endswith(".js")}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(tiny(), key="secret") as server:
        yield server


@pytest.mark.parametrize("path", ["/", "/page/style.css", "/page/main.js", "/page/icon.svg"])
def test_page_needs_no_key_and_has_a_content_security_policy(server: Served, path: str) -> None:
    answer = server.client.get(path)
    assert answer.status_code == 200 and answer.content == content(FILES[path])
    kinds = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
    assert answer.headers["content-type"].startswith(kinds[FILES[path].suffix])
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    for name in ("default-src", "frame-ancestors", "base-uri", "form-action"):
        assert policy[name] == "'none'", name
    for name in ("script-src", "style-src", "connect-src"):
        assert policy[name] == "'self'", name
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert policy["require-trusted-types-for"] == "'script'" and policy["trusted-types"] == "'none'"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert server.client.get("/v1/models").status_code == 401, "the key is asked for all the same"
    assert server.client.get(path, headers={"Host": "evil.example"}).status_code == 421


def test_unchanged_page_returns_304(server: Served) -> None:
    first = server.client.get("/")
    assert first.headers["cache-control"] == "no-cache"
    tag = first.headers["etag"]
    for known in (tag, f'"other", W/{tag}'):
        again = server.client.get("/", headers={"If-None-Match": known})
        assert again.status_code == 304 and not again.content and again.headers["etag"] == tag
    for unknown in ('"other"', tag.strip('"')):
        assert server.client.get("/", headers={"If-None-Match": unknown}).status_code == 200
    head = server.client.head("/")
    assert head.status_code == 200 and not head.content and head.headers["etag"] == tag


def test_page_loads_nothing_from_other_servers() -> None:
    for path, text in TEXTS.items():
        found = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"'`)]*", text))
        assert found <= {"http://www.w3.org/2000/svg"}, (path, "a name, which nobody fetches")
        for place in re.findall(r"""(?:src|href)="([^"#]+)"|from "([^"]+)"|url\(([^)]+)\)""", text):
            name = next(filter(None, place)).removeprefix("./").removeprefix("page/")
            assert f"/page/{name}" in FILES, (path, name)


def test_scripts_make_no_markup_from_text() -> None:
    for path, text in SCRIPTS.items():
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(", "srcdoc"):
            assert word not in text, (path, word)
    markup = TEXTS["/"]
    assert not re.findall(r"""\s(?:on\w+|style)=""", markup), "which the policy would not let be"
    assert re.findall(r"<script[^>]*>(.*?)</script>", markup, flags=re.DOTALL) == [""]
    assert "<style" not in markup


def test_all_content_lies_in_landmarks() -> None:
    body = TEXTS["/"].split("<body>")[1]
    for landmark in ("header", "nav", "main", "noscript"):
        body = re.sub(rf"<{landmark}\b.*?</{landmark}>", "", body, flags=re.DOTALL)
    assert re.findall(r"<(\w+)", body) == ["a"], "the link that skips to the prompt"


def test_elements_and_imports_of_scripts_exist() -> None:
    named = set(re.findall(r'\bid="([\w-]+)"', TEXTS["/"]))
    sought = {name for text in SCRIPTS.values() for name in re.findall(r'\belement\("([\w-]+)"\)', text)}
    assert len(sought) > 20 and sought <= named
    for path, text in SCRIPTS.items():
        for names, module in re.findall(r'import \{([^}]+)\} from "\./([\w.]+)"', text):
            for name in re.split(r",\s*", names.strip()):
                exported = rf"export (?:async )?(?:function\*?|class|const|let) {name}\b"
                assert re.search(exported, TEXTS[f"/page/{module}"]), (path, module, name)


def fields() -> dict[str, dict[str, str]]:
    """The attributes of the sampling fields of the page, by name."""
    inputs = re.findall(r"<input ([^>]*)>", TEXTS["/"].split('class="fields"')[1].split("</div>")[0])
    found = [dict(re.findall(r'([\w-]+)="([^"]*)"', attributes)) for attributes in inputs]
    return {attributes["name"]: attributes for attributes in found}


def test_media_types_are_those_of_the_library() -> None:
    (types,) = re.findall(r'data-media-types="([^"]*)"', TEXTS["/"])
    assert json.loads(unescape(types)) == MEDIA_TYPES


def test_sampling_defaults_are_those_of_the_library() -> None:
    table: dict[str, Any] = {**vars(DEFAULTS), "max_tokens": MAX_TOKENS}
    filled = {name: float(attributes["value"]) for name, attributes in fields().items() if "value" in attributes}
    assert filled == {name: table[name] for name in filled}
    assert {name for name in fields() if name not in filled} == {"top_k", "seed", "loop_penalty"}  # left to the server
    assert float(fields()["loop_penalty"]["placeholder"]) == LOOP_PENALTY
