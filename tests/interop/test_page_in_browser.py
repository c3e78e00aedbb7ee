"""The page in Chromium, from a server in a separate process: texts are generated, stopped, forked, shown again after a
reload and continued after a kill; then two tabs, hostile texts, files, a key, mistakes, a phone and the keyboard."""

import gzip
from pathlib import Path
from typing import Any

import pytest
from data.made_documents import docx, epub, html
from interop.browser import (
    DROP,
    DROP_TWO,
    FAILED,
    NAME_OF_FOCUS,
    RUN_AXE,
    ServerProcess,
    Visit,
    axe_source,
    process_of,
    visiting,
)
from serving.servers import until

pytestmark = pytest.mark.interop

ATTACK = '<img src=x onerror="window.hacked = 1"></span></script><script>window.hacked = 2</script> &lt;b&gt; ${1}'


def test_generate_fork_and_reload(visit: Visit, page_server: ServerProcess) -> None:
    page = visit.page
    visit.set(max_tokens=20)
    visit.write("bad cab")
    first = visit.current
    until(lambda: visit.text[-200:] == page_server.by_id[first]["tail"])
    assert visit.text.startswith("bad cab") and page.locator(".token").count() > 5
    assert page.locator(".token:not([class*=' b'])").count() == 0, "each token has its surprisal"
    told = page_server.by_id[first]
    assert visit.text[-200:] == told["tail"] and page.inner_text("#text-size") == f"{told['tokens']} tokens"
    line = page.locator(f"#tree [data-id='{first}'] .line").text_content()
    assert line == told["given"].lstrip() + told["written"], "nothing is inserted where the model goes on"
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
    until(lambda: visit.text == whole)

    shown = [page.inner_text("#tree"), page.inner_text("#meter")]
    tokens = page.locator(".token").evaluate_all("spans => spans.map(({ className, title }) => className + title)")
    visit.reload()
    assert visit.current == second and visit.text == whole
    assert [page.inner_text("#tree"), page.inner_text("#meter")] == shown
    found = page.locator(".token").evaluate_all("spans => spans.map(({ className, title }) => className + title)")
    assert found == tokens and len(tokens) > 30, "the server has the surprisal too"
    page.click(f"[data-id='{root}'][role=treeitem]")
    until(lambda: visit.text == "bad cab")
    assert page.evaluate("Object.keys(localStorage) + ';' + Object.keys(sessionStorage)") == "lmlong.options;"


def test_stopped_turn_keeps_what_was_generated(visit: Visit, page_server: ServerProcess) -> None:
    before = page_server.by_id
    visit.set(max_tokens=4096, temperature=0)
    visit.begin("dab")
    visit.page.wait_for_selector(".token >> nth=30")
    visit.page.keyboard.press("Escape")
    visit.wait()
    assert "kept" in visit.status
    told = page_server.by_id[visit.current]
    assert told["tokens"] > 30 and visit.text[-200:] == told["tail"]
    until(lambda: len(page_server.sessions()) == len(before) + 2)
    visit.set(max_tokens=5)
    visit.write()
    assert page_server.by_id[visit.current]["parent"] == told["id"]
    assert visit.text[-200:] == page_server.by_id[visit.current]["tail"]
    visit.forgive("404")  # where the server was slow to notice that nobody reads


def test_turn_is_generated_again_after_the_server_is_killed(chromium: Any, page_run: Path, tmp_path: Path) -> None:
    with (
        process_of(page_run, "--sessions", str(tmp_path / "sessions")) as server,
        visiting(chromium, server.url) as visit,
    ):
        page = visit.page
        visit.set(max_tokens=1500, temperature=0)
        visit.begin("bad cab")
        page.wait_for_selector(".token >> nth=50")
        page.fill("#prompt", "a draft that is not lost")
        server.kill()
        page.wait_for_selector("text=The server does not respond")
        shown = visit.text
        server.start()
        visit.wait()
        assert visit.text.startswith(shown) and "Generated 1,500 tokens" in visit.status
        told = server.by_id[visit.current]
        assert visit.text[-200:] == told["tail"] and told["tokens"] > 1000
        assert page.input_value("#prompt") == "a draft that is not lost"

        server.kill()
        page.keyboard.press("Control+Enter")
        page.wait_for_selector("text=The server does not respond")
        server.start()
        visit.wait()
        assert visit.text.count("a draft that is not lost") == 1
        assert server.by_id[visit.current]["parent"] == told["id"]
        assert len(server.sessions()) == 3, "no fork is left of what broke off"
        visit.forgive(FAILED)
        visit.check()


def test_alternative_token_forks(visit: Visit, page_server: ServerProcess) -> None:
    page = visit.page
    visit.set(max_tokens=40, temperature=1)
    visit.write("abacad ")
    first, tokens = visit.current, page.locator(".token")
    before = tokens.all_text_contents()
    at = next(number for number, text in enumerate(before) if number > 2 and text.isascii() and text.isalpha())
    assert "bits" in (tokens.nth(at).get_attribute("title") or "")
    tokens.nth(at).click()
    assert "bits" in page.inner_text("#card") and page.locator("#card button").count() >= 5
    page.mouse.click(2, 2)
    page.wait_for_selector("#card", state="hidden")
    tokens.nth(at).click()
    other = page.locator("#card button:enabled").first
    name = other.locator(".name").inner_text().replace("␣", " ").replace("↵", "\n")
    other.click()
    until(lambda: visit.current not in ("", first))
    visit.wait()
    assert visit.text.startswith("abacad " + "".join(before[:at]) + name) and name != before[at]
    found = page_server.by_id
    told = found[visit.current]
    assert told["parent"] == found[first]["parent"] and visit.text[-200:] == told["tail"]


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("book.DOCX", "page.html", "utf-16.txt", "book.epub")]


@pytest.mark.parametrize("name", ["text.txt.gz", "epub without suffix", *SLOW])
def test_document_is_read_and_continued(visit: Visit, page_server: ServerProcess, tmp_path: Path, name: str) -> None:
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
    assert visit.text.endswith(read["tail"])
    assert read["tail"].endswith(("\nc\td\n", "bad cab\n"))
    visit.set(max_tokens=5)
    visit.write("dab")
    assert page_server.by_id[visit.current]["parent"] == read["id"]
    assert read["tail"] + "dab" in visit.text


def test_reload_while_generating_shows_what_was_generated(visit: Visit, page_server: ServerProcess) -> None:
    visit.set(max_tokens=3)
    visit.write("bad")
    before = page_server.by_id
    visit.set(max_tokens=4096, temperature=0)
    visit.begin(" and its own words")
    visit.page.wait_for_selector(".token >> nth=30")
    turn, shown = visit.current, visit.text
    visit.page.reload()
    until(lambda: turn in page_server.by_id)
    assert len(page_server.by_id) == len(before) + 1
    visit.page.goto(f"{page_server.url}/?again#{turn}")
    visit.page.wait_for_selector(".turn >> nth=2")
    assert visit.text.startswith(shown) and visit.text[-200:] == page_server.by_id[turn]["tail"]
    assert visit.page.locator(".token").count() < 4096


def test_two_tabs_show_the_same_sessions(visit: Visit, page_server: ServerProcess) -> None:
    visit.set(max_tokens=5)
    visit.write("bad cab")
    first = visit.current
    other = Visit(visit.page.context.new_page(), page_server.url)
    other.page.goto(f"{page_server.url}/#{first}")
    until(lambda: other.text == visit.text)
    other.set(max_tokens=4)
    other.write(" dab")
    second = other.current
    visit.page.bring_to_front()
    visit.page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    visit.page.click(f"[data-id='{second}'][role=treeitem]")
    until(lambda: visit.text == other.text)
    other.page.click("#delete")
    until(lambda: other.current == first)
    visit.write()
    assert visit.status == "That turn is no longer on the server." and visit.current == ""
    visit.forgive("404")
    other.check()


def test_hostile_text_is_shown_as_text(visit: Visit, tmp_path: Path) -> None:
    page = visit.page
    visit.set(max_tokens=8)
    visit.write(ATTACK)
    visit.write(ATTACK)
    assert visit.text.count(ATTACK) == 2
    file = tmp_path / "<img src=x onerror=hacked=1>.txt"
    file.write_text(ATTACK)
    page.set_input_files("#file", file)
    visit.wait()
    assert file.name in visit.status
    until(lambda: visit.text == ATTACK)
    visit.reload()
    assert ATTACK in page.inner_text("#text")
    assert page.locator("#text img, #text script, #tree img, #tree script, #status img").count() == 0
    assert page.evaluate("window.hacked") is None


def test_text_and_state_files_are_opened_and_saved(visit: Visit, page_server: ServerProcess, tmp_path: Path) -> None:
    page, book, state = visit.page, tmp_path / "book.txt", tmp_path / "book.state"
    book.write_text("abacad, cab bad é\n" * 3000)
    page.evaluate(DROP, book.read_text())
    page.wait_for_selector("text=Read book.txt")
    read = page_server.by_id[visit.current]
    assert read["tokens"] > 3000 and read["parent"] is None
    until(lambda: len(visit.text) == 40_000)
    assert book.read_text().endswith(visit.text)
    page.click("text=Show earlier text")
    until(lambda: visit.text == book.read_text())
    with page.expect_download() as download:
        page.click("#download")
    download.value.save_as(state)
    page.set_input_files("#file", state)
    until(lambda: visit.current != read["id"])
    again = page_server.by_id[visit.current]
    assert (again["tokens"], again["tail"], again["parent"]) == (read["tokens"], read["tail"], None)
    until(lambda: visit.text == read["tail"])
    assert "the uploaded state, which does not store it" in page.inner_text("#text")
    visit.wait()
    visit.set(max_tokens=3)
    visit.write("dab")
    page.click(f"[data-id='{again['id']}'][role=treeitem]")
    visit.agrees = False
    page.click("#delete")
    assert again["id"] in page_server.by_id and "the 1 that follows it" in visit.questions[-1]
    visit.agrees = True
    page.click("#delete")
    until(lambda: visit.current == "")
    assert {again["id"], read["id"]} & page_server.by_id.keys() == {read["id"]}
    state.write_bytes(state.read_bytes()[:1000])
    page.set_input_files("#file", state)
    page.wait_for_selector("#status.error")
    visit.forgive(FAILED)


def test_enter_generates_and_the_text_is_saved(visit: Visit, tmp_path: Path) -> None:
    page = visit.page
    visit.set(max_tokens=5)
    page.click("text=Let the model begin")
    visit.wait()
    begun = visit.text
    page.fill("#prompt", "bad")
    page.press("#prompt", "Shift+Enter")
    page.keyboard.type("cab")
    page.press("#prompt", "Enter")
    visit.wait()
    assert visit.text.startswith(begun + "bad\ncab") and page.input_value("#prompt") == ""
    with page.expect_download() as download:
        page.click("#save")
    download.value.save_as(tmp_path / "text")
    assert download.value.suggested_filename.endswith(".txt")
    assert (tmp_path / "text").read_text() == visit.text


def test_an_unreadable_file_is_reported(visit: Visit, tmp_path: Path) -> None:
    page = visit.page
    for name, data, message in [
        ("none.txt", b"", "none.txt is empty."),
        ("photo.png", b"\x89PNG\r\n\x1a\n\0\xff", "The file is not UTF-8 at byte 0, and not EPUB"),
    ]:
        (tmp_path / name).write_bytes(data)
        page.set_input_files("#file", tmp_path / name)
        page.wait_for_selector(f"#status.error >> text={message}")
    page.evaluate(DROP_TWO)
    page.wait_for_selector("text=These are 2 files")
    visit.forgive(FAILED)


AXE = axe_source()


@pytest.mark.skipif(AXE is None, reason="there is no axe-core; see CONTRIBUTING")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_axe_finds_no_violation(chromium: Any, page_server: ServerProcess, scheme: str, width: int) -> None:
    size = {"width": width, "height": 844}
    with visiting(chromium, page_server.url, color_scheme=scheme, viewport=size, reduced_motion="reduce") as visit:
        page = visit.page
        page.evaluate(AXE)
        found = {"empty": page.evaluate(RUN_AXE)}
        visit.set(max_tokens=60, temperature=1)
        visit.write("bad cab " * 9)
        visit.write()
        found["text"] = page.evaluate(RUN_AXE)
        page.evaluate("document.getElementById('sampling').open = true")
        page.locator(".token").last.click()
        found["card and sampling"] = page.evaluate(RUN_AXE)
        page.keyboard.press("Escape")
        if width < 760:
            page.click("#show-tree")
            found["tree"] = page.evaluate(RUN_AXE)
            page.keyboard.press("Escape")
        assert {name: rules for name, rules in found.items() if rules} == {}
        visit.check()


def test_learn_switch(visit: Visit, page_server: ServerProcess, tmp_path: Path) -> None:
    page = visit.page
    switch, marks = page.get_by_role("switch", name="Learn from this text"), page.locator("[role=treeitem] .learns")
    visit.set(max_tokens=5)
    assert not switch.is_checked()
    visit.write("bad cab, " * 9)
    plain = visit.current
    assert page_server.by_id[plain]["learns"] is False and not switch.is_checked() and marks.count() == 0
    page.click("#new")
    switch.check()
    page.reload()
    page.wait_for_selector("[role=treeitem]")
    until(switch.is_checked)
    visit.write("bad cab, " * 9)
    found, learning = page_server.by_id, visit.current
    assert found[learning]["learns"] is found[found[learning]["parent"]]["learns"] is True
    assert "learns" in page.inner_text("#where") and marks.count() == 2
    assert switch.is_checked() and switch.is_disabled(), "a text that learns does not stop"
    page.click(f"[data-id='{plain}'][role=treeitem]")
    assert switch.is_enabled() and "learns" not in page.inner_text("#where")
    visit.write("dab")
    assert page_server.by_id[visit.current]["learns"] is True, "it begins where the switch is on"
    page.click("#new")
    (tmp_path / "book.txt").write_text("dab, cab\n" * 20)
    for is_on in (True, False):
        switch.set_checked(is_on)
        page.set_input_files("#file", tmp_path / "book.txt")
        page.wait_for_selector("text=Read book.txt")
        visit.wait()
        assert page_server.by_id[visit.current]["learns"] == is_on
        page.click("#new")
    visit.set(max_tokens=4096, temperature=0)
    switch.check()
    visit.begin("dab")
    page.wait_for_selector(".token >> nth=20")
    page.keyboard.press("Escape")
    visit.wait()
    assert "kept" in visit.status and page_server.by_id[visit.current]["learns"] is True
    visit.forgive("404")


def test_key_is_asked_for_and_kept_in_the_tab(chromium: Any, page_run: Path, tmp_path: Path) -> None:
    options = ("--sessions", str(tmp_path / "sessions"))
    with (
        process_of(page_run, *options, LMLONG_API_KEY="secret") as server,
        visiting(chromium, server.url, answers=["wrong", "secret"]) as visit,
    ):
        page = visit.page
        assert "needs an API key" in visit.questions[0] and "rejected that key" in visit.questions[1]
        visit.set(max_tokens=5)
        visit.write("bad")
        assert [session["id"] for session in server.sessions(Authorization="Bearer secret")][1] == visit.current
        assert "secret" not in page.evaluate("JSON.stringify({...localStorage}) + document.cookie + location.href")
        page.reload()
        page.wait_for_selector("[role=treeitem]")
        assert len(visit.questions) == 2
        visit.forgive(FAILED)
        visit.check()


def test_phone_and_keyboard_reach_everything(chromium: Any, page_server: ServerProcess) -> None:
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
        actions = "new open treeitem again save download delete text colours prompt learn write"
        fields = "max_tokens temperature top_p min_p top_k repetition_penalty loop_penalty seed defaults"
        assert {*actions.split(), *fields.split()} <= {*reached}
        assert page.locator("output, [aria-live]").count() == 1, "tokens are not read out while they come"
        page.focus("#text")
        page.keyboard.press("ArrowRight")
        assert "bits" in page.inner_text("#card") and "Likeliest" in visit.status
        visit.check()
