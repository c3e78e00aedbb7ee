#!/usr/bin/env python
"""Write the reference pages that are generated from code: commands, recipe options, the Python API and the table of
attentions.

    python tools/docs.py

Run it after a change of an option, a help text or a public docstring.
"""

import argparse
import ast
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType, NoneType
from typing import Any

import click

import lmlong
from lmlong.cli.main import lmlong as command_line
from lmlong.recipe.file import recipe_class
from lmlong.recipe.kinds import ATTENTION_KINDS
from lmlong.recipe.reference import Option, reference

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
NOTE = "<!-- Written by tools/docs.py: change the code, not this page. -->"
TABLE_NOTE = "<!-- The table is written by tools/docs.py from lmlong/recipe/kinds.py. -->"
SHARED = 3
"""Options with the same text in at least this many commands are listed once."""
SAME_SECTIONS = {"text.validation.sources.N.": "text.sources.N", "conversion.predictions.": "conversion.layers"}
METHODS = {
    "CausalAttention": ["init_state", "forward", "reference", "effect", "after_effect"],
    "Encoder": ["forward"],
    "FeatureMap": ["query", "key"],
    "LanguageModel": ["init_state", "forward", "step", "logits", "loss"],
    "Recipe": ["load"],
    "TrainedClassifier": ["classify", "classify_all"],
    "TrainedLanguageModel": [
        "stream",
        "read",
        "save_state",
        "load_state",
        "conversation",
        "hidden_states",
        "stream_hidden_states",
        "use_fast_engine",
    ],
    "TrainingResult": ["losses", "metrics"],
}
"""The methods of public classes that users call or define; all others are internal."""
MADE = ["Encoder", "FeatureMap", "LanguageModel", "LinearAttention", "SoftmaxAttention", "WindowAttention"]
"""The public classes that users build by themselves."""
WITH_FIELDS = ["Classification", "HiddenStates", "PerplexityReport", "Surprise", "TrainingResult"]
"""The public classes that are results: their fields are listed."""
MOST_WORDS = 20
"""The first sentence of an explanation is shown, and further ones up to this number of words."""
PLAIN = (int, float, str, tuple, NoneType)
"""The types of defaults that are shown as they are."""


def escaped(text: str) -> str:
    """Return a text for a line of Markdown."""
    return re.sub(r"[*]", r"\\\g<0>", " ".join(text.split())).replace("<", "&lt;")


def code(text: str) -> str:
    return f"`{' '.join(text.split())}`"


def item(name: str, text: str = "", note: str = "") -> str:
    """Return an entry of a list: a name as code, a note in parentheses, and what the name means."""
    note = f" ({note})" if note else ""
    return f"- {code(name)}{note}" + (f": {text}" if text else "")


def shortened(text: str) -> str:
    """Return the first sentences of an explanation, as many as have MOST_WORDS words together."""
    sentences = re.split(r"(?<=[.?])\s+(?=[A-Z0-9*-])", escaped(text))
    shown = sentences[:1]
    for sentence in sentences[1:]:
        if len(" ".join([*shown, sentence]).split()) > MOST_WORDS:
            break
        shown.append(sentence)
    return " ".join(shown)


def leaves(group: click.Group, path: str) -> Iterator[tuple[str, click.Command, click.Context]]:
    """Iterate over all commands below a group, each with its full name."""
    context = click.Context(group, info_name=path, show_default=True)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from leaves(command, f"{path} {name}")
        elif command:
            yield f"{path} {name}", command, click.Context(command, context, f"{path} {name}", show_default=True)


def summary(text: str) -> str:
    """Return the first paragraph of a docstring or help text."""
    return " ".join(inspect.cleandoc(text).replace("\b\n", "").split("\n\n")[0].split())


def examples(text: str) -> list[str]:
    """Return the commands that a help text gives as examples."""
    lines = [line.strip() for line in text.splitlines()]
    return [line for line in lines if line.startswith(("lmlong ", "curl "))]


def options_of(command: click.Command, context: click.Context) -> list[tuple[str, str]]:
    records = [each.get_help_record(context) for each in command.params if isinstance(each, click.Option)]
    return [(name.replace(" RANGE", ""), escaped(text)) for name, text in filter(None, records)]


def commands() -> str:
    """Return the page of all commands."""
    found = list(leaves(command_line, "lmlong"))
    users: dict[tuple[str, str], list[str]] = {}
    for name, command, context in found:
        for option in options_of(command, context):
            users.setdefault(option, []).append(name.removeprefix("lmlong "))
    shared = {option: names for option, names in users.items() if len(names) >= SHARED}
    parts = [
        "# Commands",
        NOTE,
        "`KEY.PATH=VALUE` changes an option of the [recipe](recipe-options.md). Every command has `--help`, with more "
        "explanation than this page.",
        "## Options of several commands",
        "\n".join(item(name, text, ", ".join(names)) for (name, text), names in shared.items()),
    ]
    for name, command, context in found:
        arguments = " ".join(piece for piece in command.collect_usage_pieces(context) if piece != "[OPTIONS]")
        own = [option for option in options_of(command, context) if option not in shared]
        parts += [f"## {name}", *([f"Arguments: {code(arguments)}"] if arguments else [])]
        parts.append(escaped(summary(command.help or "")))
        parts += [f"```bash\n{lines}\n```"] if (lines := "\n".join(examples(command.help or ""))) else []
        parts += ["\n".join(item(*option) for option in own)] if own else []
    return "\n\n".join(parts) + "\n"


def is_section(option: Option) -> bool:
    return option.type.startswith("a section")


def option_item(option: Option) -> str:
    """Return the line of an option of a recipe: its default as it is written in a command, its values, its meaning."""
    if option.kind and option.key.endswith(".kind"):
        return item(f"{option.key}={option.kind}", shortened(option.meaning))
    written = "" if option.required or is_section(option) else f"={json.dumps(option.default)}"
    listed = not is_section(option) and (option.required or option.default is None or "one of" in option.type)
    values = re.split(r", (?:above|at|or)| or a list| \(or", option.type.removeprefix("one of "))[0] if listed else ""
    note = "; ".join(filter(None, [f"kind: {option.kind}" if option.kind else "", escaped(values)]))
    return item(option.key + written, shortened(option.meaning), note)


def recipe_options() -> str:
    """Return the page of all options of a recipe."""
    parts = [
        "# Recipe options",
        NOTE,
        "Each option with its default, as it is written in a command. `N` is an index in a list. "
        "`lmlong recipe options WORD` explains an option in full.",
    ]
    sections: dict[str, list[Option]] = {}
    for option in reference(recipe_class()):
        top, dot, _ = option.key.partition(".")
        if not option.key.startswith(tuple(SAME_SECTIONS)):
            sections.setdefault(top if dot or is_section(option) else "General", []).append(option)
    for name, options in sections.items():
        parts += [f"## {name}", "\n".join(option_item(option) for option in options)]
    parts += [f"`{prefix[:-1]}` has the options of `{same}`." for prefix, same in SAME_SECTIONS.items()]
    return "\n\n".join(parts) + "\n"


def call(function: Callable[..., Any], name: str) -> str:
    """Return the call of a function with its defaults."""
    given = inspect.signature(function)
    arguments = [
        each.replace(
            annotation=inspect.Parameter.empty,
            default=each.default if isinstance(each.default, PLAIN) or each.default is each.empty else ...,
        )
        for each in given.parameters.values()
        if each.name != "self"
    ]
    return name + str(inspect.Signature(arguments)).replace("'", '"').replace("Ellipsis", "...")


def fields(value: type) -> list[str]:
    """Return the fields of a class with their docstrings, or the comments beside them."""
    lines = textwrap.dedent(inspect.getsource(value)).splitlines()
    items = []
    (definition,) = ast.parse("\n".join(lines)).body
    assert isinstance(definition, ast.ClassDef)
    for node, after in pairwise([*definition.body, None]):
        if not isinstance(node, ast.AnnAssign):
            continue
        documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        comment = lines[(node.end_lineno or 0) - 1].partition("# ")[2]
        text = str(after.value.value) if documented else comment  # type: ignore[union-attr]
        items.append(item(f"{ast.unparse(node.target)}: {ast.unparse(node.annotation)}", escaped(text)))
    return items


def method_item(value: type, name: str) -> str:
    """Return the line of a method, or of a property."""
    method = getattr(value, name)
    shown = f".{name}" if isinstance(method, property) else call(method, f".{name}")
    return item(shown, escaped(summary(inspect.getdoc(method) or "")))


def class_parts(name: str, value: type) -> list[str]:
    """Return the parts of a class: how it is made, and the fields and methods that users need."""
    lines = [item(call(value, f"lmlong.{name}"))] if name in MADE else []
    lines += fields(value) if name in WITH_FIELDS else []
    lines += [method_item(value, method) for method in METHODS.get(name, [])]
    return [f"### {name}", escaped(summary(inspect.getdoc(value) or "")), *(["\n".join(lines)] if lines else [])]


def module_parts(name: str, module: ModuleType) -> list[str]:
    classes = [each for each in vars(module).values() if inspect.isclass(each)]
    public = [code(each.__name__) for each in classes if each.__module__.startswith(module.__name__)]
    return [f"### {name}", f"{escaped(summary(inspect.getdoc(module) or ''))} {', '.join(public)}."]


def python() -> str:
    """Return the page of the public names."""
    parts = [
        "# Python API",
        NOTE,
        "All names are attributes of `lmlong`, and typed. `help(lmlong.train)` explains arguments. The "
        "[guide](../guides/python.md) shows them in use.",
    ]
    values = {name: getattr(lmlong, name) for name in lmlong.__all__}
    parts.append("## Functions")
    for name, value in values.items():
        if inspect.isfunction(value):
            arguments = textwrap.fill(call(value, f"lmlong.{name}"), 120, subsequent_indent="    ")
            parts += [f"### {name}", f"```python\n{arguments}\n```", escaped(summary(inspect.getdoc(value) or ""))]
    parts.append("## Classes")
    for name, value in values.items():
        if inspect.isclass(value):
            parts += class_parts(name, value)
    parts.append("## Modules")
    for name, value in values.items():
        if inspect.ismodule(value):
            parts += module_parts(name, value)
    return "\n\n".join(parts) + "\n"


def attentions() -> str:
    """Return the page of attentions with its table of kinds, which follows a note."""
    page = (FOLDER / "attentions.md").read_text(encoding="utf-8")
    before, after = page.split(TABLE_NOTE)
    rows = [("`kind`", "computes", "causal", "encoder"), ("---",) * 4]
    for kind, about in ATTENTION_KINDS.items():
        rows.append(
            (code(kind), about.summary, about.state if about.causal else "no", "yes" if about.encoder else "no")
        )
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return "\n\n".join([before + TABLE_NOTE, table, after.split("\n\n", 2)[2]])


PAGES = {"attentions.md": attentions, "commands.md": commands, "recipe-options.md": recipe_options, "python.md": python}

if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page(), encoding="utf-8")
        print(FOLDER / name)
