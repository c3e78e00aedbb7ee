"""A browser and a server for the tests of the page."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from interop.browser import OPTIONS, PROGRAM, ServerProcess, Visit, process_of, visiting
from models import write_run
from serving.schedulers import subwords


@pytest.fixture(scope="module")
def page_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    write_run(folder, subwords())
    return folder


@pytest.fixture(scope="module")
def page_server(page_run: Path) -> Iterator[ServerProcess]:
    with process_of(page_run) as server:
        yield server


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    if PROGRAM is None:
        pytest.skip("there is no Chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=PROGRAM, headless=True, args=OPTIONS)
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium: Any, page_server: ServerProcess) -> Iterator[Visit]:
    with visiting(chromium, page_server.url) as visit:
        yield visit
        visit.check()
