"""Run the commands of the README and the docs, with training shortened by overrides, and follow their links.

Commands in ```sh blocks are run. For all others, such as those in ```bash blocks, the test checks that the command and
its options exist. Commands that start processes or load a plug-in run in a separate process, the others in this one.
"""

import functools
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
import torch
from commands import Finished
from commands import lmlong as call_lmlong
from machine import new_cache

from lmlong.attention import laws
from lmlong.attention.plugins import load_plugin, unload_plugin
from lmlong.cli.main import lmlong
from lmlong.model.base import count_parameters
from lmlong.model.build import build
from lmlong.model.segments import text_loss
from lmlong.recipe import file as recipe_file
from lmlong.recipe.find import shipped_recipes
from lmlong.testing import check_attention

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]}
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
DOCS = ROOT / "docs"
FILES = sorted(path for path in [ROOT / "README.md", CONTRIBUTING, *DOCS.glob("**/*.md")] if path.exists())
FENCED = re.compile(r"^```.*?^```$", flags=re.DOTALL | re.MULTILINE)
SHORT = ["training.steps=3", "text.sequence_length=64", "training.batch_size=1", "model.width=32", "model.layers=2"]
SHORT += ["model.heads=4", "training.validation_tokens=2000", "training.final_validation_tokens=0"]
SHORT += ["model.attention.linformer.projected=16"]  # as many slots as so short a sequence has room for
PACKAGES = ("email", "json")
SMALL = ["'text.sources=[{kind: files, paths: [library]}]'", "text.validation.fraction=0.5"]
"""These packages in the place of the whole standard library, on which quickstart trains."""
FIRST = "pip install -e . && lmlong train quickstart"


def blocks(page: str, kind: str) -> list[str]:
    """Return the fenced blocks of a kind; commands over several lines are joined into one."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", PAGES[page], flags=re.DOTALL | re.MULTILINE)
    return [block.replace("\\\n", " ") for name, block in found if name == kind]


def commands(page: str) -> list[str]:
    """Return the commands to run, but for those that install or test."""
    return [line for block in blocks(page, "sh") for line in block.splitlines() if line.startswith("lmlong ")]


def shortened(command: str) -> str:
    """Return a training command with all that makes it long overridden."""
    if not command.startswith("lmlong train"):
        return command
    keys = [option.partition("=")[0] for option in SHORT]
    text = SMALL if command.startswith("lmlong train quickstart") else []
    return " ".join([*(word for word in command.split() if word.partition("=")[0] not in keys), *SHORT, *text])


def run(words: list[str], folder: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "LMLONG_CACHE": str(cache), "OMP_NUM_THREADS": "1"},
    )


def log_lines() -> Iterator[str]:
    """Iterate over the lines of a log of a service; one is unlike the others."""
    for number in range(400):
        minutes, seconds = divmod(number, 60)
        event = "disk full: /var/lib/items" if number == 390 else f"GET /items/{number * 37 % 90} 200"
        yield f"2026-11-26 10:{minutes:02}:{seconds:02} INFO api {event}\n"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_cache(tmp_path_factory.mktemp("readme"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """A folder in which the README's first command was run."""
    folder = tmp_path_factory.mktemp("newcomer")
    (folder / "my-book.txt").write_text("It was a dark and stormy night. " * 200)
    (folder / "app.log").write_text("".join(log_lines()))
    draw = random.Random(0)
    reviews = [
        {"text": " ".join(draw.choices("abcdefgh", k=20)), "label": draw.choice(["neg", "pos"])} for _ in range(80)
    ]
    (folder / "reviews.jsonl").write_text("".join(json.dumps(review) + "\n" for review in reviews))
    (folder / "genome.fa").write_text(">one\n" + "GATTACA" * 500 + "\n")
    (folder / "decayed.py").write_text(blocks("docs/guides/plugins.md", "python")[0])
    for name in PACKAGES:
        package = Path(sysconfig.get_path("stdlib"), name)
        shutil.copytree(package, folder / "library" / name, ignore=shutil.ignore_patterns("__pycache__"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LMLONG_CACHE", str(cache))
        result = call_lmlong(*shlex.split(shortened(FIRST.split(" && ")[1]))[1:], cwd=folder)
    assert result.returncode == 0, result.stderr
    assert "gzip -9" in result.stdout
    return folder


@pytest.fixture(scope="module")
def run_once(folder: Path, cache: Path) -> Iterator[Callable[[str], Finished]]:
    """A command that stands on several pages is run for the first of them."""

    def once(command: str) -> Finished:
        program, *words = shlex.split(shortened(command))
        if "devices=" not in command and "plugin" not in command:
            return call_lmlong(*words, cwd=folder)
        done = run(["-m", program, *words], folder, cache)
        return Finished(done.returncode, done.stdout, done.stderr)

    with pytest.MonkeyPatch.context() as patch, open(os.devnull) as nothing:
        patch.setenv("LMLONG_CACHE", str(cache))
        patch.setattr(sys, "stdin", nothing)
        yield functools.cache(once)


def test_readme_begins_with_the_first_command() -> None:
    lines = [line for block in blocks("README.md", "sh") for line in block.splitlines()]
    assert (lines[0], lines[-1]) == (FIRST, "pip install -e '.[test]' && pytest")
    assert lines[1].startswith("lmlong generate runs/quickstart")


def test_readme_shows_the_line_that_score_finds(run_once: Callable[[str], Finished]) -> None:
    (command,) = [each for each in commands("README.md") if "app.log" in each]
    shown = next(block for block in blocks("README.md", "text") if "disk full" in block).splitlines()
    found = run_once(command).stdout.splitlines()
    assert (len(found), found[0]) == (len(shown), shown[0])
    assert set(shown) <= {line.rstrip() for line in log_lines()}


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[] if page == "README.md" else pytest.mark.slow)
        for page in sorted(PAGES)
        if commands(page)
    ],
)
def test_commands_of_a_page_work(run_once: Callable[[str], Finished], page: str) -> None:
    for command in commands(page):
        result = run_once(command)
        assert result.returncode == 0, f"{command}: {result.stderr}"
        assert result.stdout.strip(), command
        if command.startswith("lmlong generate") and "--stats" not in command:
            # after so few steps the newest checkpoint may not be the best
            assert [line for line in result.stderr.splitlines() if ": loads step-" not in line] == []


def unquoted(command: str) -> str:
    """The characters of a command that no quotes or backslash protect from the shell, without its comment."""
    quoted = r"""'[^']*'|"[^"]*"|\\."""
    return re.sub(r"(^|\s)#.*", "", re.sub(quoted, "", command))


def examples() -> Iterator[tuple[str, str]]:
    """Iterate over all commands that users may paste: of pages, recipes and help texts, with where they are."""
    for page in PAGES:
        yield from ((page, line) for block in blocks(page, "sh") for line in block.splitlines())
        yield from ((page, command) for command in named(page))
    for name, path in shipped_recipes().items():
        yield from ((name, line[2:]) for line in path.read_text().splitlines() if line.startswith("# lmlong"))
    for words in every_command():
        lines = (find(words).help or "").splitlines()
        yield from ((" ".join(words), line.strip()) for line in lines if line.strip().startswith("lmlong "))


def every_command(words: tuple[str, ...] = ("lmlong",)) -> Iterator[list[str]]:
    """Iterate over the words of all commands and subcommands."""
    command = find(list(words))
    yield list(words)
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            yield from every_command((*words, name))


def test_no_example_has_unquoted_patterns() -> None:
    """zsh ends a command with a pattern that matches no file, such as text.sources.0.paths=[my-book.txt]."""
    found = {f"{place}: {command}" for place, command in examples() if re.search(r"[][*?]", unquoted(command))}
    assert not found


def test_python_example_works(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (example,) = blocks("README.md", "python")
    monkeypatch.chdir(folder)
    exec(example, {"__name__": "__main__"})
    assert capsys.readouterr().out


def named(page: str) -> list[str]:
    """Return the commands that a page names, in blocks and in its text."""
    lines = [line for kind in ("", "bash", "sh") for block in blocks(page, kind) for line in block.splitlines()]
    inline = re.findall(r"`(lmlong\s[^`]+)`", FENCED.sub("", PAGES[page]))
    return [" ".join(command.split()) for command in [*lines, *inline] if command.startswith("lmlong")]


def find(words: list[str]) -> click.Command:
    """Return the command that is called by words such as `lmlong state build`."""
    command: click.Command = lmlong
    for word in words[1:]:
        if not isinstance(command, click.Group):
            break
        found = command.get_command(click.Context(command), word)
        assert found, f"there is no {' '.join(words)}"
        command = found
    return command


def options(command: click.Command) -> set[str]:
    return {name for parameter in command.params for name in [*parameter.opts, *parameter.secondary_opts]}


@pytest.mark.parametrize("page", sorted(page for page in PAGES if named(page)))
def test_named_commands_have_their_options(page: str) -> None:
    for command in named(page):
        words = shlex.split(command)
        given = {word.partition("=")[0] for word in words if word.startswith("-")}
        assert given <= options(find(words)), command


@pytest.mark.parametrize("page", sorted(page for page in PAGES if "tools/" in PAGES[page]))
def test_named_tools_have_their_options(page: str) -> None:
    lines = PAGES[page].replace("\\\n", " ")
    found = re.findall(r"^(tools/\S.*)$|`(tools/[^`]+)`", lines, flags=re.MULTILINE)
    for command in ("".join(each) for each in found):
        tool, *words = shlex.split(command)
        assert (ROOT / tool).exists(), command
        folders = (ROOT / tool).parent.glob(f"{Path(tool).stem.split('_')[0]}*/*.py")
        source = "".join(path.read_text() for path in [*([ROOT / tool] if (ROOT / tool).is_file() else []), *folders])
        assert not [word for word in words if word.startswith("--") and f'"{word}"' not in source], command


def test_source_map_names_every_package() -> None:
    text = CONTRIBUTING.read_text() if CONTRIBUTING.exists() else README
    paths = re.findall(r"^    (lmlong/\S+)", text, flags=re.MULTILINE)
    assert [path for path in paths if not list(ROOT.glob(path))] == []
    rooms = {path.parent.name for path in (ROOT / "lmlong").glob("*/*.py")}
    assert rooms == {path.split("/")[1] for path in paths}


def test_page_of_laws_has_every_law() -> None:
    page = PAGES["docs/reference/attentions.md"]
    rows = re.findall(r"^\| (\d+) \| .* \| (.*) \|$", page, flags=re.MULTILINE)
    assert {int(number): name for number, name in rows} == dict(laws.LAWS)
    assert "Twelve laws" in page and len(laws.LAWS) == 12
    for text in PAGES.values():
        assert not re.search(r"\b(six|seven|eight|nine|ten|eleven) laws", text)


def test_guide_to_plugins_adds_an_effect(tmp_path: Path) -> None:
    (file := tmp_path / "decayed.py").write_text("\n".join(blocks("docs/guides/plugins.md", "python")))
    cls = load_plugin(file).attentions["decayed"]
    unload_plugin(file)
    report = check_attention(lambda *sizes: cls(*sizes, cls.Options()))
    assert report.divides and report.verdicts[-1].number == 12


def test_table_of_recipes_is_complete() -> None:
    table = re.findall(r"^\| `([\w-]+)` \|.*?\| ([\d.]+) M \|", PAGES["docs/guides/recipes.md"], flags=re.MULTILINE)
    rows = dict(table)
    loaded = {name: recipe_file.load(name) for name in shipped_recipes()}
    sized = {name for name, each in loaded.items() if not each.training.init_from and each.conversion is None}
    assert rows.keys() == sized
    for name, millions in rows.items():
        recipe = recipe_file.load(name)
        with torch.device("meta"):
            model = build(recipe, recipe.text.tokenizer.most_tokens)
        assert round(count_parameters(model) / 1e6, 1) == pytest.approx(
            float(millions), abs=0.5 if "." not in millions else 0.01
        )


@pytest.mark.parametrize("name", shipped_recipes())
def test_recipe_says_how_it_is_run_and_builds(name: str) -> None:
    first = shipped_recipes()[name].read_text().splitlines()[0]
    assert re.match(rf"# lmlong (train|convert \S+ --to) {name}\b", first)
    overrides = [word for word in shlex.split(first)[4:] if "=" in word]
    recipe = recipe_file.load(name, overrides)
    if recipe.label_names is not None:
        recipe = recipe_file.load(name, [*overrides, f"text.labels.names=[{', '.join(f'n{n}' for n in range(300))}]"])
    small = recipe.model.model_copy(update={"width": 2 * recipe.model.heads, "positions": "none"})
    model = build(recipe.model_copy(update={"model": small}), 300)
    nats, _ = text_loss(model, torch.arange(40)[None], torch.arange(1, 41)[None])
    assert nats.item() / 40 == pytest.approx(5.7, abs=0.5)  # ln 300: it has learned nothing yet


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


@pytest.mark.parametrize("page", FILES, ids=lambda page: str(page.relative_to(ROOT)))
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
    used = {target for page in FILES for target, _ in links(page)}
    assert set((DOCS / "images").iterdir()) <= used


def test_dead_links_and_anchors_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A title: twice\n\n## A title: twice\n\n```sh\n# no heading\n```\n[x](#a) `[y](z)` [w](v.md#u)\n")
    assert links(page) == [(page, "a"), (tmp_path / "v.md", "u")]
    assert anchors(page, of_site=False) == {"a-title-twice", "a-title-twice-1"}
    assert anchors(page, of_site=True) == {"a-title-twice", "a-title-twice_1"}
