"""The page of `lmlong report` in Chromium: it asks for nothing, fits a phone, and prints its charts whole."""

import json
from pathlib import Path
from typing import Any

import pytest
from commands import lmlong

pytestmark = pytest.mark.interop


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_report_is_read_on_a_screen_and_on_paper(chromium: Any, page_run: Path, tmp_path: Path, scheme: str) -> None:
    metrics = [{"step": 1, "loss": 9.0, "tokens_per_second": 50.0}]
    metrics.append({"step": 1, "sample": "<img src=x onerror=alert(1)>"})
    (page_run / "metrics.jsonl").write_text("".join(f"{json.dumps(entry)}\n" for entry in metrics))
    file = tmp_path / "page.html"
    assert lmlong("report", page_run, "-o", file, "--no-measure").returncode == 0
    with chromium.new_context(color_scheme=scheme, viewport={"width": 360, "height": 700}) as context:
        page, asked, complaints = context.new_page(), [], []
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: complaints.append(message.text))
        page.goto(file.as_uri())
        assert (asked, complaints) == ([file.as_uri()], [])
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(21, 24, 28)"
        assert dark == (scheme == "dark")
        assert page.locator("svg[role=img]").count() >= 2 and page.locator("main img").count() == 0
        page.emulate_media(media="print")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert page.locator("figure").first.evaluate("(it) => getComputedStyle(it).breakInside") == "avoid"
        assert page.locator(".printed pre").first.is_visible() and not page.locator("figure table").first.is_visible()
