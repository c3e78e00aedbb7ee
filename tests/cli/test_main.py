"""The command `lmlong`: help, errors, exit codes, and what a shell completes.

A process of its own is started where its imports, its streams or `python -m lmlong` are tested."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from commands import lmlong

import docs
from lmlong import __version__
from lmlong.cli import main as cli
from lmlong.errors import CheckpointError, DivergedError, LmlongError, RecipeError

COMMAND = [sys.executable, "-m", "lmlong"]
HEAVY = {"torch", "lightning", "datasets", "sentencepiece", "numpy", "matplotlib", "pydantic", "ruamel.yaml"}


def imported(*words: str) -> set[str]:
    """The heavy libraries that a command has imported by its end."""
    code = "import sys, atexit; atexit.register(lambda: print(*sys.modules, file=sys.stderr))\n"
    code += f"sys.argv = {['lmlong', *words]!r}\nfrom lmlong.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", timeout=60)
    assert done.returncode == 0, done.stderr
    return HEAVY & set(done.stderr.split())


def test_help_lists_commands_in_groups() -> None:
    done = lmlong("--help")
    for title, group in cli.GROUPS.items():
        listed = done.stdout.split(f"{title}:\n")[1].split("\n\n")[0].splitlines()
        assert [line.split()[0] for line in listed] == list(group)
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert (done.returncode, done.stderr) == (0, "")
    assert lmlong() == done


@pytest.mark.parametrize("group", ["recipe", "data", "state"])
def test_summaries_of_subcommands_are_whole(group: str) -> None:
    summaries = lmlong(group, "--help").stdout.split("Commands:\n")[1].splitlines()
    assert summaries and all(line.endswith(".") and "..." not in line for line in summaries)


def test_the_module_is_the_command() -> None:
    done = subprocess.run([*COMMAND, "--version"], capture_output=True, encoding="utf-8", timeout=60)
    assert done.stdout == f"lmlong {__version__}\n"


@pytest.mark.parametrize(
    ("words", "libraries"),
    [(("--help",), set()), (("recipe", "check", "quickstart"), {"pydantic", "ruamel.yaml"})],
)
def test_command_imports_no_unneeded_library(words: tuple[str, ...], libraries: set[str]) -> None:
    assert imported(*words) == libraries


def test_commands_have_few_options() -> None:
    commands = [command for _, command, _ in docs.leaves(docs.command_line, "lmlong")]
    counts = [sum(isinstance(each, click.Option) for each in command.params) for command in commands]
    assert max(counts) <= 20 and sum(counts) <= 130


def leave(monkeypatch: pytest.MonkeyPatch, action: Callable[[], object] | BaseException) -> object:
    """The exit code of `lmlong` when its command does `action`, or raises it."""

    @click.command()
    def command() -> object:
        if isinstance(action, BaseException):
            raise action
        return action()

    monkeypatch.setattr(cli.Pipeline, "get_command", lambda self, context, name: command)
    monkeypatch.setattr(sys, "argv", ["lmlong", "train"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return caught.value.code


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (LmlongError("no space left on /data"), 1, "error: no space left on /data\n"),
        (RecipeError(["a.yaml:1: x: unknown key."]), 2, "error: a.yaml:1: x: unknown key.\n"),
        (RecipeError(["a.yaml:1: x", "a.yaml:2: y"]), 2, "error: 2 mistakes\na.yaml:1: x\na.yaml:2: y\n"),
        (DivergedError("the loss is nan"), 3, "error: the loss is nan\n"),
        (CheckpointError("damaged"), 4, "error: damaged\n"),
        (click.ClickException("odd"), 1, "Error: odd\n"),
        (KeyboardInterrupt(), 130, ""),
        (click.Abort(), 130, ""),
        (click.exceptions.Exit(5), 5, ""),
    ],
)
def test_failure_has_its_message_and_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, message: str
) -> None:
    assert leave(monkeypatch, error) == code
    assert capsys.readouterr() == ("", message)


def test_return_value_is_not_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    assert leave(monkeypatch, lambda: 7) == 0


@pytest.mark.parametrize("bug", [ValueError("a bug"), EOFError(), BrokenPipeError("of a worker")])
def test_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, bug: Exception) -> None:
    with pytest.raises(type(bug)):
        leave(monkeypatch, bug)


@pytest.mark.parametrize(("variable", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_no_color_turns_colors_off(monkeypatch: pytest.MonkeyPatch, variable: dict[str, str], coloured: bool) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in variable.items():
        monkeypatch.setenv(name, value)
    seen = []
    assert leave(monkeypatch, lambda: seen.append(click.get_current_context().color)) == 0
    assert seen == [None if coloured else False]


@pytest.mark.parametrize("command", ["options", "list"], ids=["more than a buffer", "less than a buffer"])
def test_closed_pipe_ends_the_command_quietly(command: str) -> None:
    words = [*COMMAND, "recipe", command]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=buffered) as process:
        assert process.stdout and process.stderr
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_output_is_utf8(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("# é\nname: ü\ntraining: {steps: 1}\n", encoding="utf-8")
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    words = [*COMMAND, "recipe", "show", str(recipe)]
    done = subprocess.run(words, capture_output=True, encoding="utf-8", timeout=60, env=ascii_only)
    assert (done.stdout, done.returncode) == (recipe.read_text(encoding="utf-8"), 0)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first", "second"):
        (tmp_path / "runs" / name / "checkpoints").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        (["tra"], {"train"}),
        (["nonsense", ""], set(cli.COMMANDS)),
        (["train", "qu"], {"quickstart"}),
        (["recipe", "show", "who"], {"whole-book"}),
        (["train", "quickstart", "training.kern"], {"training.kernel="}),
        (["train", "quickstart", "text.sources.0.pa"], {"text.sources.0.paths="}),
        (["train", "quickstart", "training.kernel=t"], {"training.kernel=torch", "training.kernel=triton"}),
        (["train", "quickstart", "training.kernel", "=", "t"], {"torch", "triton"}),  # as bash cuts it
        (["train", "quickstart", "training.compile", "="], {"true", "false"}),
        (
            ["train", "quickstart", "training.steps=1", "model.hea"],
            {"model.heads=", "model.head_dim=", "model.head_norm=", "model.head_norm_epsilon="},
        ),
        (["train", "quickstart", "training.steps=1"], set()),
        (["generate", ""], {"runs/first", "runs/second"}),
        (["generate", "se"], {"second"}),
        (["eval", "runs/first", "runs/s"], {"runs/second"}),
    ],
)
def test_what_a_shell_offers(runs: None, line: list[str], offered: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_LMLONG_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", " ".join(["lmlong", *line]))
    monkeypatch.setenv("COMP_CWORD", str(len(line)))
    done = lmlong()
    lines = [line.partition(",") for line in done.stdout.splitlines()]
    assert done.returncode == 0
    assert {value for kind, _, value in lines if kind == "plain"} == offered


def test_the_script_for_a_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_LMLONG_COMPLETE", "zsh_source")
    done = lmlong()
    assert done.returncode == 0 and "#compdef lmlong" in done.stdout
