"""The page in Chromium, from a server that is a process: texts are written, stopped, gone back in, and gone on with
after the server was killed."""

import gzip
from pathlib import Path
from typing import Any

import httpx
import pytest
from data.made_documents import docx, epub, html
from interop.browser import FAILED, ServerProcess, Visit, process_of, visiting
from serving.servers import until

pytestmark = pytest.mark.interop


def test_a_text_is_written_gone_back_in_and_forked(visit: Visit, page_server: ServerProcess) -> None:
    page = visit.page
    visit.set(max_tokens=20)
    visit.write("bad cab")
    first = visit.current
    until(lambda: visit.text[-200:] == page_server.by_id[first]["tail"])
    assert visit.text.startswith("bad cab") and page.locator(".token").count() > 5
    assert page.locator(".token:not([class*=' b'])").count() == 0, "each has its surprise"
    told = page_server.by_id[first]
    assert visit.text[-200:] == told["tail"] and page.inner_text("#text-size") == f"{told['tokens']} tokens"
    assert page.inner_text("#verdict").startswith(f"text × {(told['tokens'] + 1) // 2}, state × 1.0")
    root = told["parent"]
    assert page_server.by_id[root]["parent"] is None

    visit.write(" dab")
    second = visit.current
    told = page_server.by_id[second]
    assert told["parent"] == first and " dab" in visit.text and visit.text[-200:] == told["tail"]
    whole = visit.text
    page.click(f"[data-id='{first}'][role=treeitem]")
    assert whole.startswith(visit.text) and visit.current == first
    visit.write(", bad")
    other = visit.current
    assert page_server.by_id[other]["parent"] == first and other != second
    assert page.locator(f"#tree [data-id='{other}']").get_attribute("aria-level") == "3"
    page.click(f"[data-id='{second}'][role=treeitem]")
    assert visit.text == whole and "one of 2" in page.inner_text("#where")

    assert page.locator(".mark:visible").count() >= 1
    page.set_viewport_size({"width": 390, "height": 844})
    dot = page.locator(".mark:visible").first
    chosen = dot.get_attribute("data-id")
    dot.click()
    assert visit.current == chosen and whole.startswith(visit.text) and visit.text != whole
    page.set_viewport_size({"width": 1280, "height": 800})
    page.click(f"[data-id='{root}'][role=treeitem]")
    assert visit.text == "bad cab" and visit.current == root
    page.reload()
    page.wait_for_selector("[role=treeitem]")
    assert visit.current == root and visit.text == "bad cab"
    page.click(f"[data-id='{second}'][role=treeitem]")
    assert visit.text == whole, "the browser keeps it"


def test_a_turn_that_is_stopped_holds_what_was_written(visit: Visit, page_server: ServerProcess) -> None:
    before = page_server.by_id
    visit.set(max_tokens=4096, temperature=0)
    visit.begin("dab")
    visit.page.wait_for_selector(".token >> nth=30")
    visit.page.keyboard.press("Escape")
    visit.wait()
    assert "kept" in visit.status
    told = page_server.by_id[visit.current]
    assert 30 < told["tokens"] < 4000 and visit.text[-200:] == told["tail"]
    until(lambda: len(page_server.sessions()) == len(before) + 2)
    visit.set(max_tokens=5)
    visit.write()
    assert page_server.by_id[visit.current]["parent"] == told["id"]
    visit.forgive("409")  # where the server was slow to notice that nobody reads


def test_a_server_that_is_killed_and_started_again_is_written_on_with(
    chromium: Any, page_run: Path, tmp_path: Path
) -> None:
    with (
        process_of(page_run, "--sessions", str(tmp_path / "sessions")) as server,
        visiting(chromium, server.url) as visit,
    ):
        page = visit.page
        visit.set(max_tokens=3000, temperature=0)
        visit.begin("bad cab")
        page.wait_for_selector(".token >> nth=50")
        page.fill("#prompt", "a draft that is not lost")
        server.kill()
        page.wait_for_selector("text=The server does not answer")
        shown = visit.text
        assert page.is_visible("#now") and page.inner_text("#countdown")
        server.start()
        page.evaluate("document.getElementById('now').click()")  # it may have tried by itself meanwhile
        visit.wait()
        assert visit.text.startswith(shown) and "Wrote 3,000 tokens" in visit.status
        told = server.by_id[visit.current]
        assert visit.text[-200:] == told["tail"] and told["tokens"] > 2000
        assert page.input_value("#prompt") == "a draft that is not lost"

        server.kill()
        page.keyboard.press("Control+Enter")
        page.wait_for_selector("text=The server does not answer")
        server.start()
        visit.wait()
        assert visit.text.count("a draft that is not lost") == 1
        assert server.by_id[visit.current]["parent"] == told["id"]
        assert len(server.sessions()) == 3, "no fork is left of what broke off"
        visit.forgive(FAILED)
        visit.check()


def test_an_alternative_is_gone_on_with(visit: Visit, page_server: ServerProcess) -> None:
    page = visit.page
    visit.set(max_tokens=40, temperature=1)
    visit.write("abacad ")
    first, tokens = visit.current, page.locator(".token")
    before = tokens.all_text_contents()
    at = next(number for number, text in enumerate(before) if number > 2 and text.isascii() and text.isalpha())
    tokens.nth(at).hover()
    page.wait_for_selector("#card:visible")
    assert "bits" in page.inner_text("#card") and page.locator("#card .rows button").count() >= 5
    page.mouse.move(2, 2)
    page.wait_for_selector("#card", state="hidden")
    tokens.nth(at).click()
    other = page.locator("#card .rows button:enabled").first
    name = other.locator(".name").inner_text().replace("␣", " ").replace("↵", "\n")
    other.click()
    until(lambda: visit.current not in ("", first))
    visit.wait()
    after = tokens.all_text_contents()
    assert after[:at] == before[:at] and after[at] == name != before[at]
    found = page_server.by_id
    told = found[visit.current]
    assert told["parent"] == found[first]["parent"] and visit.text[-200:] == told["tail"]


@pytest.mark.parametrize(
    "name", ["book.epub", "book.DOCX", "page.html", "text.txt.gz", "utf-16.txt", "epub without suffix"]
)
def test_a_document_is_read_by_the_server_and_written_on(
    visit: Visit, page_server: ServerProcess, tmp_path: Path, name: str
) -> None:
    make = {
        "book.DOCX": docx,
        "page.html": html,
        "text.txt.gz": lambda: gzip.compress(b"bad cab\n" * 99),
        "utf-16.txt": lambda: ("bad cab\n" * 99).encode("utf-16"),
    }
    (tmp_path / name).write_bytes(make.get(name, epub)())
    visit.page.set_input_files("#file", tmp_path / name)
    visit.page.wait_for_selector(f"text=Read {name}")
    visit.wait()
    read = page_server.by_id[visit.current]
    assert visit.status == f"Read {name}: {read['tokens']} tokens."
    assert visit.text == read["tail"] and "not in this browser" in visit.page.inner_text("#text")
    assert read["tail"].endswith(("\nc\td\n", "bad cab\n"))
    visit.set(max_tokens=5)
    visit.write("dab")
    assert page_server.by_id[visit.current]["parent"] == read["id"]
    assert visit.text.startswith(read["tail"] + "dab")


def test_a_document_that_cannot_be_read_is_refused_with_the_reason(visit: Visit, tmp_path: Path) -> None:
    (tmp_path / "book.epub").write_bytes(b"no book")
    visit.page.set_input_files("#file", tmp_path / "book.epub")
    visit.page.wait_for_selector("#status.error")
    assert "cannot be read as EPUB" in visit.status and visit.current == ""
    visit.forgive(FAILED)


@pytest.mark.parametrize("text", ["cab", "bad aba", "ca", "é"])
def test_a_seed_writes_the_text_of_the_interface(visit: Visit, page_server: ServerProcess, text: str) -> None:
    asked = {"max_tokens": 300, "seed": 5, "temperature": 1.2, "top_p": 0.9, "top_k": 200, "repetition_penalty": 1.1}
    visit.set(**asked)
    visit.write(text)
    root = page_server.by_id[visit.current]["parent"]
    fork = httpx.post(f"{page_server.url}/v1/sessions/{root}/fork", json={}).json()["id"]
    body = {"session": fork, "logprobs": 1, **asked}
    written = httpx.post(f"{page_server.url}/v1/completions", json=body, timeout=60).json()["choices"][0]
    assert visit.text == text + written["text"]
    count = visit.page.locator(".token").count()
    told_apart = visit.page.locator(".token[class*=' b']").count()
    assert count > 20 and told_apart > 0.9 * count, "but for bytes that browsers take for other characters"


def test_a_page_that_is_left_while_it_writes_leaves_nothing_half_done(visit: Visit, page_server: ServerProcess) -> None:
    visit.set(max_tokens=3)
    visit.write("bad")
    before, parent = page_server.by_id, visit.current
    visit.set(max_tokens=4096, temperature=0)
    visit.begin(" and its own words")
    visit.page.wait_for_selector(".token >> nth=30")
    visit.page.reload()
    visit.page.wait_for_selector("[role=treeitem]")
    assert visit.page.input_value("#prompt") == " and its own words"
    until(lambda: page_server.by_id == before)
    until(lambda: visit.page.locator("[role=treeitem]").count() == len(before))
    visit.page.click(f"[data-id='{parent}'][role=treeitem]")
    visit.set(max_tokens=3)
    visit.write()
    assert "bad" in visit.text and " and its own words" in visit.text
    visit.page.reload()
    visit.page.wait_for_selector("[role=treeitem]")
    assert visit.page.input_value("#prompt") == ""
    visit.forgive("409")
