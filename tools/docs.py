#!/usr/bin/env python
"""Write the reference pages that are generated from code: commands, recipe options and the Python API.

    python tools/docs.py

Run it after a change of an option, a help text or a public docstring.
"""

import argparse
import ast
import inspect
import json
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import click

import lmlong
from lmlong.cli.main import lmlong as command_line
from lmlong.recipe.file import recipe_class
from lmlong.recipe.reference import Option, reference

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
NOTE = "<!-- Written by tools/docs.py: change the code, not this page. -->"
SHARED = 4
"""Options with the same text in at least this many commands are listed once."""
SAME_SECTIONS = {"text.validation.sources.N.": "text.sources.N", "conversion.predictions.": "conversion.layers"}


def cell(text: str) -> str:
    """Return a text for a cell of a table."""
    return re.sub(r"[|*]", r"\\\g<0>", " ".join(text.split())).replace("<", "&lt;")


def code(text: str) -> str:
    """Return code for a cell of a table: backticks keep the backslash of an escaped bar."""
    return f"<code>{text.replace('<', '&lt;').replace('|', '&#124;')}</code>" if "|" in text else f"`{text}`"


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def leaves(group: click.Group, path: str) -> Iterator[tuple[str, click.Command, click.Context]]:
    """Iterate over all commands below a group, each with its full name."""
    context = click.Context(group, info_name=path, show_default=True)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from leaves(command, f"{path} {name}")
        elif command:
            yield f"{path} {name}", command, click.Context(command, context, f"{path} {name}", show_default=True)


def paragraphs(text: str) -> str:
    """Return a docstring or help text as Markdown: indented lines and examples become blocks of code, and lines of a
    name and its meaning become a list."""
    parts = []
    for part in re.split(r"\n\s*\n", inspect.cleandoc(text).replace("\b\n", "").replace("\f", "")):
        lines = part.splitlines()
        named = [re.fullmatch(r"([\w-]+) {2,}(\S.*)", line) for line in lines]
        if len(lines) > 1 and all(named):
            parts.append("\n".join(f"- `{match[1]}`: {match[2]}" for match in named if match))
            continue
        first = next(
            (i for i, line in enumerate(lines) if line.startswith((" ", ">>>", "lmlong ", "curl "))), len(lines)
        )
        prose, code = " ".join(lines[:first]), textwrap.dedent("\n".join(lines[first:]))
        kind = "python" if code.startswith(">>>") else "text" if code and not code.startswith("lmlong ") else "bash"
        parts += [*([prose] if prose and prose != "Example:" else []), *([f"```{kind}\n{code}\n```"] if code else [])]
    return "\n\n".join(parts)


def options_of(command: click.Command, context: click.Context) -> list[tuple[str, str]]:
    records = [each.get_help_record(context) for each in command.params if isinstance(each, click.Option)]
    return [(code(name.replace(" RANGE", "")), cell(text)) for name, text in filter(None, records)]


def commands() -> str:
    """Return the page of all commands."""
    found = list(leaves(command_line, "lmlong"))
    counts = Counter(option for _, command, context in found for option in options_of(command, context))
    shared = [option for option, count in counts.items() if count >= SHARED]
    parts = [
        "# Commands",
        NOTE,
        "Every command has `--help`. `KEY.PATH=VALUE` changes an option of the [recipe](recipe-options.md). Results go "
        "to standard output, everything else to standard error. [Exit codes](exit-codes.md).",
        "## Common options",
        "All commands take `--plugin`; each command lists which of the others it takes.",
        table(("option", "meaning"), shared),
    ]
    for name, command, context in found:
        usage = command.collect_usage_pieces(context)
        parts += [f"## {name}", f"```text\n{name} {' '.join(usage)}\n```", paragraphs(command.help or "")]
        options = options_of(command, context)
        own = [option for option in options if option not in shared]
        common = [re.findall(r"--[\w-]+", option)[0] for option, text in options if (option, text) in shared]
        parts += [table(("option", "meaning"), own)] if own else []
        common = [f"`{option}`" for option in common if option != "--plugin"]
        parts += [f"Common options: {', '.join(common)}."] if common else []
    return "\n\n".join(parts) + "\n"


def is_section(option: Option) -> bool:
    return option.type.startswith("a section")


def option_row(option: Option) -> tuple[str, str, str, str]:
    key = f"`{option.key}`" + (f" (kind: {option.kind})" if option.kind else "")
    default = "required" if option.required else "" if is_section(option) else code(json.dumps(option.default))
    return key, cell(option.type), default, cell(option.meaning)


def recipe_options() -> str:
    """Return the page of all options of a recipe."""
    parts = [
        "# Recipe options",
        NOTE,
        "Write `training.steps=100` on the command line, or nested sections in a [recipe](../guides/recipes.md). `N` "
        "is an index in a list. `lmlong recipe options WORD` searches this list.",
    ]
    sections: dict[str, list[Option]] = {}
    for option in reference(recipe_class()):
        top, dot, _ = option.key.partition(".")
        if not option.key.startswith(tuple(SAME_SECTIONS)):
            sections.setdefault(top if dot or is_section(option) else "General", []).append(option)
    for name, options in sections.items():
        rows = [option_row(option) for option in options]
        parts += [f"## {name}", table(("option", "values", "default", "meaning"), rows)]
    parts += [f"`{prefix[:-1]}` has the options of `{same}`." for prefix, same in SAME_SECTIONS.items()]
    return "\n\n".join(parts) + "\n"


def syntax(value: object) -> ast.ClassDef | ast.FunctionDef:
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(value))).body  # type: ignore[arg-type]
    assert isinstance(node, ast.ClassDef | ast.FunctionDef)
    return node


def definition(function: ast.FunctionDef, name: str) -> str:
    """Return the call of a function with its types and defaults."""
    arguments = re.sub(r"^(self|cls)(, )?", "", ast.unparse(function.args)).replace("=", " = ")
    returns = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    return textwrap.fill(
        f"{name}({arguments}){returns}".replace("'", '"'), 84, subsequent_indent="    ", break_long_words=False
    )


def fields(value: type) -> Sequence[tuple[str, ...]]:
    """Return the fields of a class with their docstrings, or the comments beside them."""
    lines = textwrap.dedent(inspect.getsource(value)).splitlines()
    body = [*syntax(value).body, None]
    rows = []
    for node, after in pairwise(body):
        if not isinstance(node, ast.AnnAssign):
            continue
        documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        comment = lines[(node.end_lineno or 0) - 1].partition("# ")[2]
        text = str(after.value.value) if documented else comment  # type: ignore[union-attr]
        rows.append((f"`{ast.unparse(node.target)}`", code(ast.unparse(node.annotation)), cell(text)))
    return rows


def function_parts(node: ast.FunctionDef, name: str, text: str | None) -> list[str]:
    is_property = any("property" in ast.unparse(each) for each in node.decorator_list)
    shown = (
        f"{name}: {ast.unparse(node.returns)}".replace("'", '"')
        if is_property and node.returns
        else definition(node, name)
    )
    return [f"```python\n{shown}\n```", paragraphs(text or "")]


def class_parts(value: type) -> list[str]:
    """Return the parts of a class: what it extends, its fields, and the documented methods that it defines, or that its
    bases do if they are not public."""
    bases = [f"`{base.__name__}`" for base in value.__bases__ if base.__name__ in lmlong.__all__]
    ours = [each for each in value.__mro__ if each.__module__.startswith("lmlong.")]
    described = [each for each in value.__bases__ if each in ours and each.__name__ not in lmlong.__all__]
    nodes = [node for each in (value, *described) for node in syntax(each).body]
    owner = next(base for base in value.__mro__ if "__init__" in vars(base))
    if owner in ours[1:]:
        nodes.append(syntax(vars(owner)["__init__"]))
    methods: dict[str, ast.FunctionDef] = {}
    for node in nodes:
        if isinstance(node, ast.FunctionDef):
            methods.setdefault(node.name, node)
    parts = [f"Extends {', '.join(bases)}."] if bases else []
    parts += [table(("field", "type", "meaning"), rows)] if (rows := fields(value)) else []
    for node in methods.values():
        if node.name == "__init__":
            parts.insert(0, f"```python\n{definition(node, value.__name__)}\n```")
        elif not node.name.startswith("_") and (text := ast.get_docstring(node)):
            parts += [f"#### {value.__name__}.{node.name}", *function_parts(node, node.name, text)]
    return parts


def module_parts(module: ModuleType) -> list[str]:
    classes = [each for each in vars(module).values() if inspect.isclass(each)]
    public = [each for each in classes if each.__module__.startswith(module.__name__)]
    return [
        table(("class", "meaning"), [(f"`{c.__name__}`", cell((c.__doc__ or "").split("\n\n")[0])) for c in public])
    ]


def python() -> str:
    """Return the page of the public names."""
    parts = ["# Python API", NOTE, "All names are attributes of `lmlong`. See the [guide](../guides/python.md)."]
    values = {name: getattr(lmlong, name) for name in lmlong.__all__}
    parts.append("## Functions")
    for name, value in values.items():
        if inspect.isfunction(value):
            node = syntax(value)
            assert isinstance(node, ast.FunctionDef)
            parts += [f"### {name}", *function_parts(node, f"lmlong.{name}", inspect.getdoc(value))]
    parts.append("## Classes")
    for name, value in values.items():
        if inspect.isclass(value):
            parts += [f"### {name}", paragraphs(inspect.getdoc(value) or ""), *class_parts(value)]
    parts.append("## Modules")
    for name, value in values.items():
        if inspect.ismodule(value):
            parts += [f"### {name}", (inspect.getdoc(value) or "").split("\n\n")[0], *module_parts(value)]
    return "\n\n".join(parts) + "\n"


PAGES = {"commands.md": commands, "recipe-options.md": recipe_options, "python.md": python}

if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page(), encoding="utf-8")
        print(FOLDER / name)
