"""Chromium, which opens the page of a server that is a process, and all that it complains of."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from serving.servers import until

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

OPTIONS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]

FAILED = "Failed to load resource"
"""What Chromium says itself of a request that gets no answer, or an error."""

NAME_OF_FOCUS = "(({ id, name, role }) => id || name || role)(document.activeElement)"

DROP = """(text) => {
    const data = new DataTransfer();
    data.items.add(new File([text], "book.txt"));
    document.body.dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true }));
}"""

DROP_TWO = """() => {
    const data = new DataTransfer();
    for (const name of ["one.txt", "two.txt"]) data.items.add(new File(["text"], name));
    document.body.dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true }));
}"""

RUN_AXE = """async () => {
    const found = await axe.run(document, { resultTypes: ["violations"] });
    const about = ({ id, nodes }) => [id, ...nodes.map(({ html, any }) => [html.slice(0, 200), any[0]?.message])];
    return found.violations.map(about);
}"""

WATCH = """
window.violations = [];
addEventListener("securitypolicyviolation", (event) => violations.push([event.violatedDirective, event.blockedURI]));
"""


def axe_source() -> str | None:
    """The source of axe-core, if npm has installed it in the repository's root or below NODE_PATH."""
    folders = [
        Path(__file__).parents[2] / "node_modules",
        *map(Path, os.environ.get("NODE_PATH", "").split(os.pathsep)),
    ]
    files = [folder / "axe-core" / "axe.min.js" for folder in folders]
    return next((file.read_text(encoding="utf-8") for file in files if file.is_file()), None)


class ServerProcess:
    """`lmlong serve` on a port that stays the same when it is started again."""

    def __init__(self, run: Path, *options: str, **environment: str):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        words = [sys.executable, "-m", "lmlong", "serve", str(run), "--port", str(self.port)]
        self._words, self._environment = [*words, *options], {**os.environ, **environment}
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        process = subprocess.Popen(self._words, stderr=subprocess.PIPE, text=True, env=self._environment)
        self.process, lines = process, list[str]()
        assert process.stderr is not None
        while "rows, decodes by" not in (line := process.stderr.readline()):
            assert line, lines
            lines.append(line)

    def kill(self) -> None:
        """End it as a power cut would."""
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate(timeout=30)

    def sessions(self, **headers: str) -> list[dict[str, Any]]:
        answer = httpx.get(f"{self.url}/v1/sessions", headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]

    @property
    def by_id(self) -> dict[str, dict[str, Any]]:
        return {session["id"]: session for session in self.sessions()}


@contextmanager
def process_of(run: Path, *options: str, **environment: str) -> Iterator[ServerProcess]:
    server = ServerProcess(run, *options, **environment)
    try:
        yield server
    finally:
        server.kill()


class Visit:
    """A page in a browser that has seen none before."""

    def __init__(self, page: Any, url: str, answers: Sequence[str] = ()):
        """`answers` are those to the first questions; the page's questions are answered by OK, while it `agrees`."""
        self.page = page
        self.agrees, self.questions, self.answers = True, list[str](), [*answers]
        page.on("dialog", self._answer)
        self.complaints: list[str] = []
        page.add_init_script(WATCH)
        page.on("console", lambda message: message.type in ("error", "warning") and self._note(message.text))
        page.on("pageerror", lambda error: self._note(str(error)))
        page.on("request", lambda request: request.url.startswith((url, "blob:")) or self._note(request.url))
        page.goto(url)
        until(lambda: " " in page.title())

    def _answer(self, dialog: Any) -> None:
        self.questions.append(dialog.message)
        if self.agrees:
            dialog.accept(*self.answers[:1])
            self.answers = self.answers[1:]
        else:
            dialog.dismiss()

    def reload(self) -> None:
        """Load the page again, and wait until it shows the text."""
        self.page.reload()
        self.page.wait_for_selector("[role=treeitem]")
        self.page.wait_for_selector(".turn")

    def _note(self, complaint: str) -> None:
        self.complaints.append(complaint)

    def forgive(self, word: str) -> None:
        """Forget complaints that are meant to be there."""
        self.complaints = [text for text in self.complaints if word not in text]

    def check(self) -> None:
        """Nothing was forbidden, and nothing went wrong."""
        assert self.page.evaluate("violations") == []
        assert self.complaints == []

    def set(self, **options: Any) -> None:
        """Set options of sampling, a seed among them: a model that was not trained may end a text anywhere."""
        self.page.evaluate("document.getElementById('sampling').open = true")
        for name, value in {"seed": 1, **options}.items():
            self.page.fill(f"[name={name}]", str(value))
        self.page.evaluate("document.getElementById('sampling').open = false")

    def write(self, text: str = "") -> None:
        """Write a turn, by the keyboard alone."""
        self.begin(text)
        self.wait()

    def begin(self, text: str = "") -> None:
        self.page.focus("#prompt")
        self.page.keyboard.insert_text(text)
        self.page.evaluate(
            """() => {
                const stop = document.getElementById("stop");
                window.workBegan = new Promise((resolve) =>
                    new MutationObserver(resolve).observe(stop, { attributeFilter: ["hidden"] }));
            }"""
        )
        self.page.keyboard.press("Control+Enter")
        self.page.evaluate("window.workBegan.then(() => true)")  # a short text may be finished before it is looked for

    def wait(self) -> None:
        """Wait until nothing is read or written, and the text is shown to its end."""
        self.page.wait_for_selector("#stop", state="hidden")
        self.page.wait_for_selector(".writing", state="detached")

    @property
    def current(self) -> str:
        return self.page.evaluate("location.hash.slice(1)")

    @property
    def status(self) -> str:
        return self.page.inner_text("#status")

    @property
    def text(self) -> str:
        """The text as it stands there, without hints."""
        return "".join(self.page.locator(".turn .given, .turn .token").all_text_contents())


@contextmanager
def visiting(browser: Any, url: str, answers: Sequence[str] = (), **options: Any) -> Iterator[Visit]:
    context = browser.new_context(**options)
    context.set_default_timeout(60_000)
    try:
        yield Visit(context.new_page(), url, answers)
    finally:
        context.close()
