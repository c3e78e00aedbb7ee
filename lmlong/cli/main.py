"""The command `lmlong`: its subcommands, imported only when called, and their exit codes."""

import os
import sys
from importlib import import_module
from typing import NoReturn

import click
from click.shell_completion import shell_complete

from lmlong import __version__
from lmlong.cli import streams
from lmlong.errors import LmlongError, RecipeError, UsageError, nearest
from lmlong.io.home import lend_home
from lmlong.io.system_errors import explain, lack_of_memory

GROUPS = {
    "Make a model": {
        "recipe": ("lmlong.cli.recipe:recipe", "List, show, check and copy recipes; explain their options."),
        "data": ("lmlong.cli.data:data", "Tokenize and inspect text; train tokenizers."),
        "train": ("lmlong.cli.train:train", "Train a language model from a recipe."),
    },
    "Use a model": {
        "generate": ("lmlong.cli.generate:generate", "Continue a text with a trained model."),
        "score": ("lmlong.cli.score:score", "Measure how surprising each part of a text is, as it arrives."),
        "serve": ("lmlong.cli.serve:serve", "Serve a trained model over HTTP."),
        "state": ("lmlong.cli.state:state", "Save the state after a text, and inspect state files."),
    },
    "Measure a model": {
        "eval": ("lmlong.cli.evaluate:eval_", "Measure prediction by context length, recall, and tasks."),
        "check": ("lmlong.cli.check:check", "Check the causal-attention invariants of a model or plug-in."),
        "report": ("lmlong.cli.report:report", "Write an HTML page about runs, to send to others."),
        "bench": ("lmlong.cli.bench:bench", "Measure the speed of each attention."),
    },
    "Import, convert and export": {
        "import": ("lmlong.cli.import_model:import_", "Import a pretrained model."),
        "convert": ("lmlong.cli.convert:convert", "Convert a trained model to another attention."),
        "export": ("lmlong.cli.export_model:export", "Export a run for transformers or llama.cpp."),
    },
    "Other": {
        "info": ("lmlong.cli.info:info", "Describe this installation, or a run."),
    },
}
"""The commands in the groups of --help, each with its function and a summary."""

COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}

RENAMED = {
    "tokenizer": "lmlong data train-tokenizer, or lmlong data tokenizer-info",
    "probe": "lmlong eval --by recall",
    "spectrum": "lmlong eval --by spectrum",
    "lm-eval": "lmlong eval --tasks",
}
"""What replaces a command of an earlier version."""

INTERRUPTED = 130
READER_LEFT = 141

COMPLETION = "_LMLONG_COMPLETE"
"""The environment variable with which a shell requests completions."""


class Pipeline(click.Group):
    """The commands in their groups. A command is imported when it is called."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            if context.resilient_parsing:
                return None
            if new := RENAMED.get(name):
                raise UsageError(f"{name}: has another name now. Use {new}.")
            context.fail(f"No such command '{name}'.{nearest(name, COMMANDS)}")
        module, _, attribute = COMMANDS[name][0].partition(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        longest = max(map(len, COMMANDS))
        for title, group in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(longest), summary) for name, (_, summary) in group.items()])


@click.group(
    cls=Pipeline,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@click.version_option(__version__, prog_name="lmlong", message="%(prog)s %(version)s")
@click.pass_context
def lmlong(context: click.Context) -> None:
    """Train and run causal language models on texts too long for softmax attention.

    \b
    Example: train a small model on Python source, then generate text.
      lmlong train quickstart
      lmlong generate runs/quickstart --prompt "def "
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def main() -> NoReturn:
    """Run the command line and exit; a traceback is a bug of lmlong."""
    streams.prepare()
    lend_home()
    if completion := os.environ.get(COMPLETION):
        sys.exit(shell_complete(lmlong, {}, "lmlong", COMPLETION, completion))
    try:
        code = _run(sys.argv[1:])
        sys.stdout.flush()
    except KeyboardInterrupt as interrupt:
        if str(interrupt):
            click.echo(interrupt, err=True)
        code = INTERRUPTED
    except (OSError, MemoryError, RuntimeError) as error:
        if (exit_code := _system_error(error)) is None:
            raise
        code = exit_code
    sys.exit(code)


def _run(words: list[str]) -> int:
    """Run a command and return its exit code; print the message of an error that the user can correct."""
    color = False if os.environ.get("NO_COLOR") else None
    try:
        # click's own `main` would report an interrupt or an end of file anywhere in our code as "Aborted!".
        with lmlong.make_context("lmlong", words, color=color) as context:
            lmlong.invoke(context)
        return 0
    except click.exceptions.Exit as leave:
        return leave.exit_code
    except click.Abort:
        return INTERRUPTED
    except click.MissingParameter as error:
        message = " ".join(error.format_message().split()).removesuffix(".")  # choices are on lines of their own
        click.echo(f"error: {message}: {error.ctx.command_path} --help" if error.ctx else f"error: {message}", err=True)
        return error.exit_code
    except click.ClickException as error:
        recipe_option = _recipe_option(error, words) if isinstance(error, click.NoSuchOption) else None
        (recipe_option or error).show()
        return error.exit_code
    except LmlongError as error:
        return _print_error(error)


def _recipe_option(error: click.NoSuchOption, words: list[str]) -> click.UsageError | None:
    """Return an error that shows the syntax of a recipe option that was given with dashes, or None."""
    takes_overrides = error.ctx and any(parameter.name == "overrides" for parameter in error.ctx.command.params)
    if not takes_overrides:
        return None
    from lmlong.recipe.file import recipe_class
    from lmlong.recipe.mistakes import paths_of

    number = next((n for n, word in enumerate(words) if word.partition("=")[0] == error.option_name), len(words))
    written = [word.partition("=")[2] for word in words[number : number + 1]] + words[number + 1 : number + 2]
    value = next((word for word in written if word and not word.startswith("-")), "VALUE")
    if not (paths := paths_of(error.option_name.lstrip("-"), recipe_class())):
        return None
    keys = " or ".join(f"{path}={value}" for path in paths)
    message = f"No such option '{error.option_name}'. Options of a recipe have no dashes: {keys}"
    return click.UsageError(message, ctx=error.ctx)


def _system_error(error: Exception) -> int | None:
    """Print an error of the operating system or a lack of memory, and return its exit code; None for a bug."""
    of_output = isinstance(error, OSError) and error.filename == streams.STDOUT
    if of_output:
        streams.discard_output()
    if of_output and isinstance(error, BrokenPipeError):
        return READER_LEFT
    explained = explain(error) if isinstance(error, OSError) else lack_of_memory(error)
    return None if explained is None else _print_error(explained)


def _print_error(error: LmlongError) -> int:
    """Print an error, with each mistake of a recipe on a separate line, and return its exit code."""
    message = str(error)
    if isinstance(error, RecipeError) and len(error.mistakes) > 1:
        message = "\n".join([f"{len(error.mistakes)} mistakes", *error.mistakes])
    click.echo(f"error: {message}", err=True)
    return error.exit_code
