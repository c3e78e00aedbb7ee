"""The page in Chromium, where it is hard: with hostile texts, files of all kinds, a key, mistakes, on a phone, by the
keyboard alone."""

from pathlib import Path
from typing import Any

import pytest
from interop.browser import DROP, FAILED, FILL, NAME_OF_FOCUS, ServerProcess, Visit, process_of, visiting
from serving.servers import until

pytestmark = pytest.mark.interop

ATTACK = '<img src=x onerror="window.hacked = 1"></span></script><script>window.hacked = 2</script> &lt;b&gt; ${1}'


def test_a_hostile_text_is_text(visit: Visit, tmp_path: Path) -> None:
    page = visit.page
    visit.set(max_tokens=8)
    visit.write(ATTACK)
    visit.write(ATTACK)
    assert visit.text.count(ATTACK) == 2
    file = tmp_path / "<img src=x onerror=hacked=1>.txt"
    file.write_text(ATTACK)
    page.set_input_files("#file", file)
    visit.wait()
    assert file.name in page.inner_text("#text") and visit.text == ATTACK
    page.evaluate("localStorage.clear()")  # so that the server's words are shown
    page.reload()
    page.wait_for_selector("[role=treeitem]")
    assert ATTACK in page.inner_text("#text")
    assert page.locator("#text img, #text script, #tree img, #tree script, #status img").count() == 0
    assert page.evaluate("window.hacked") is None


def test_files_go_in_and_out(visit: Visit, page_server: ServerProcess, tmp_path: Path) -> None:
    page, book, state = visit.page, tmp_path / "book.txt", tmp_path / "book.state"
    book.write_text("abacad, cab bad é\n" * 3000)
    page.evaluate(DROP, book.read_text())
    page.wait_for_selector("text=Read book.txt")
    read = page_server.by_id[visit.current]
    assert read["tokens"] > 3000 and read["parent"] is None
    assert "of which this is the end" in page.inner_text("#text") and book.read_text().endswith(visit.text)
    with page.expect_download() as download:
        page.click("#download")
    download.value.save_as(state)
    page.set_input_files("#file", state)
    until(lambda: visit.current != read["id"])
    again = page_server.by_id[visit.current]
    assert (again["tokens"], again["tail"], again["parent"]) == (read["tokens"], read["tail"], None)
    assert visit.text == read["tail"], "the browser has no other text of it"
    visit.wait()
    visit.set(max_tokens=3)
    visit.write("dab")
    page.click(f"[data-id='{again['id']}'][role=treeitem]")
    page.click("#delete")
    page.click("#sure-no")
    assert again["id"] in page_server.by_id
    page.click("#delete")
    assert "the 1 that follows it" in page.inner_text("#sure")
    page.click("#sure-yes")
    until(lambda: visit.current == "")
    assert {again["id"], read["id"]} & page_server.by_id.keys() == {read["id"]}
    state.write_bytes(state.read_bytes()[:1000])
    page.set_input_files("#file", state)
    page.wait_for_selector("#status.error")
    visit.forgive(FAILED)


def test_the_key_is_asked_for_and_kept_in_the_tab_alone(chromium: Any, page_run: Path, tmp_path: Path) -> None:
    options = ("--sessions", str(tmp_path / "sessions"))
    with process_of(page_run, *options, LMLONG_API_KEY="secret") as server, visiting(chromium, server.url) as visit:
        page = visit.page
        page.fill("#key", "wrong")
        page.keyboard.press("Enter")
        page.wait_for_selector("text=did not take that key")
        page.fill("#key", "secret")
        page.keyboard.press("Enter")
        until(lambda: " " in page.title())
        visit.set(max_tokens=5)
        visit.write("bad")
        assert [session["id"] for session in server.sessions(Authorization="Bearer secret")][1] == visit.current
        assert "secret" not in page.evaluate("JSON.stringify({...localStorage}) + document.cookie + location.href")
        page.reload()
        page.wait_for_selector("[role=treeitem]")
        assert not page.is_visible("#key-dialog")
        visit.forgive(FAILED)
        visit.check()


def test_mistakes_are_told_in_words(visit: Visit) -> None:
    page = visit.page
    visit.set(max_tokens=100_000)
    visit.begin("bad")
    visit.wait()
    page.wait_for_selector("#status.error")
    assert "100,000 is above 4,096" in visit.status and page.input_value("#prompt") == "bad"
    visit.forgive(FAILED)


def test_a_phone_and_a_keyboard_reach_everything(chromium: Any, page_server: ServerProcess) -> None:
    phone = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "reduced_motion": "reduce"}
    with visiting(chromium, page_server.url, color_scheme="dark", **phone) as visit:
        page = visit.page
        visit.set(max_tokens=60)
        visit.write("bad cab " * 40)
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        page.locator(".token").last.tap()
        card = page.locator("#card").bounding_box()
        assert card and card["x"] >= 0 and card["x"] + card["width"] <= 390 and card["y"] + card["height"] <= 844
        page.keyboard.press("Escape")
        page.tap("#show-tree")
        assert page.locator("[role=treeitem]").first.is_visible()
        page.locator("[role=treeitem]").first.tap()
        assert not page.locator("[role=treeitem]").first.is_visible()
        visit.check()
    with visiting(chromium, page_server.url) as visit:
        page = visit.page
        visit.set(max_tokens=20)
        visit.write("bad")
        page.evaluate("document.getElementById('sampling').open = true")
        page.locator(".skip").focus()
        reached = []
        for _ in range(40):
            reached.append(page.evaluate(NAME_OF_FOCUS))
            page.keyboard.press("Tab")
        wanted = "new open treeitem again download delete text colours mono prompt write max_tokens temperature top_p"
        assert {*wanted.split(), "top_k", "repetition_penalty", "loop_penalty", "seed", "defaults"} <= {*reached}
        assert page.locator("output, [aria-live]").count() == 1, "tokens are not read out while they come"
        page.focus("#text")
        page.keyboard.press("ArrowRight")
        assert "bits" in page.inner_text("#card") and "Likeliest" in visit.status
        visit.check()


def test_a_browser_that_is_full_forgets_the_texts_used_longest_ago(visit: Visit) -> None:
    page = visit.page
    visit.set(max_tokens=10)
    visit.write("bad cab")
    first = visit.current
    page.evaluate(FILL)
    visit.write(" dab")
    kept = page.evaluate("Object.keys(localStorage).filter((key) => key.startsWith('lmlong.text.'))")
    assert f"lmlong.text.{visit.current}" in kept and "lmlong.text.old" not in kept
    assert f"lmlong.text.{first}" in kept, "which was used later"
    page.evaluate("localStorage.setItem('other', 'x'.repeat(5_200_000 - JSON.stringify({...localStorage}).length))")
    visit.write(" cab" * 1000)
    assert visit.text.startswith("bad cab") and " cab" * 1000 in visit.text, "this tab has it all the same"


def test_where_nothing_can_be_kept_the_page_works(chromium: Any, page_server: ServerProcess) -> None:
    context = chromium.new_context()
    context.add_init_script(
        "for (const name of ['localStorage', 'sessionStorage'])"
        " Object.defineProperty(window, name, { get() { throw new DOMException('no', 'SecurityError'); } });"
    )
    visit = Visit(context.new_page(), page_server.url)
    visit.set(max_tokens=10)
    visit.write("bad cab")
    visit.page.click("#delete")
    visit.page.click("#sure-yes")
    until(lambda: "Deleted" in visit.status)
    visit.check()
    context.close()
