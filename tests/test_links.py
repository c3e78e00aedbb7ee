"""Every link and anchor of the README and the docs leads somewhere, on GitHub and on the built site."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(path for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.glob("**/*.md")] if path.exists())
FENCED = re.compile(r"^```.*?^```$", flags=re.DOTALL | re.MULTILINE)


def prose(page: Path) -> str:
    """Return a page without its blocks of code, in which # and [](...) mean other things."""
    return FENCED.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path, of_site: bool) -> set[str]:
    """Return the anchors of a page's headings; the site joins several spaces and hyphens to one."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.*)", prose(page), flags=re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).strip()
        slug = re.sub(r"[\s-]+", "-", slug) if of_site else slug.replace(" ", "-")
        number = sum(each == slug or re.fullmatch(rf"{re.escape(slug)}[-_]\d+", each) is not None for each in found)
        found.add(f"{slug}{'_' if of_site else '-'}{number}" if number else slug)
    return found


def links(page: Path) -> list[tuple[Path, str]]:
    """Return the files that a page links to, each with an anchor or an empty string."""
    targets = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", prose(page)))
    local = [target.partition("#") for target in targets if not re.match(r"https?:|mailto:", target)]
    return [((page.parent / path).resolve() if path else page, anchor) for path, _, anchor in local]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    for target, anchor in links(page):
        assert target.is_file(), target
        assert not anchor or anchor in anchors(target, of_site=False), f"{target}#{anchor}"
        if DOCS in page.parents:
            assert DOCS in target.parents, f"{target} is not part of the site"
            assert not anchor or anchor in anchors(target, of_site=True), f"{target}#{anchor} on the site"


def test_every_page_is_in_index_and_navigation() -> None:
    reached, new = set(), {DOCS / "index.md"}
    while new:
        reached |= new
        new = {target for page in new for target, _ in links(page) if target.suffix == ".md"} - reached
    navigation = re.findall(r"([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), flags=re.MULTILINE)
    pages = set(DOCS.glob("**/*.md"))
    assert pages <= reached
    assert {DOCS / name for name in navigation} == pages
    assert len(navigation) == len(pages)


def test_every_image_is_used() -> None:
    used = {target for page in PAGES for target, _ in links(page)}
    assert set((DOCS / "images").iterdir()) <= used


def test_dead_links_and_anchors_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A title: twice\n\n## A title: twice\n\n```sh\n# no heading\n```\n[x](#a) `[y](z)` [w](v.md#u)\n")
    assert links(page) == [(page, "a"), (tmp_path / "v.md", "u")]
    assert anchors(page, of_site=False) == {"a-title-twice", "a-title-twice-1"}
    assert anchors(page, of_site=True) == {"a-title-twice", "a-title-twice_1"}
