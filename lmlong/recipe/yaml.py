"""YAML 1.2 as a tree of plain values, with the line or override that each value comes from.

Only sections, lists, text, numbers, booleans and null are built from a text.
"""

import io
import json
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

KeyPath = tuple[str | int, ...]
"""The path of a value: keys of sections and indices of lists, from the top."""

Origin = int | str
"""Where a value comes from: its line in a file, or the override that set it."""

UNREADABLE = object()
"""Stands for a value that is not plain YAML; a mistake of the tree reports it."""

MAX_SIZE = 1 << 20
"""Maximum size of a recipe, with its aliases written out: its characters, and VALUE_SIZE for each value."""
VALUE_SIZE = 8

MAX_DEPTH = 200
"""Maximum depth of nested values; the parser takes seconds for thousands of brackets."""

STANDARD = "tag:yaml.org,2002:"
WORDS = {STANDARD + name for name in ("str", "timestamp", "value", "merge")}
MERGE = STANDARD + "merge"
CONVERTED = {STANDARD + name for name in ("null", "bool", "int", "float")}


class BrokenYAML(Exception):
    """A text that is not YAML; `line` counts from 1."""

    def __init__(self, line: int, message: str):
        super().__init__(message)
        self.line = line


class BadOverride(Exception):
    """An override of a value that does not exist."""


class Mistake(NamedTuple):
    """A mistake in a recipe."""

    path: KeyPath
    origin: Origin
    message: str


class Tree:
    """The values of a recipe, with their origins, and the mistakes found so far."""

    file: Path | None = None

    def __init__(self, values: Any = None, origin: Origin = 1):
        self.values = values
        self.overrides: list[str] = []
        self.origins: dict[KeyPath, Origin] = {(): origin}
        self.mistakes: list[Mistake] = []

    def origin(self, path: KeyPath) -> Origin:
        """Return the origin of the value at a path, or of the innermost section around it that has one."""
        above = (path[:depth] for depth in range(len(path), -1, -1))
        return next(self.origins[path] for path in above if path in self.origins)

    def override(self, given: str | tuple[str, Any]) -> None:
        """Replace a value by an override: key.path=value with a value in YAML, or a key and its value."""
        if isinstance(given, str):
            text, example = given, "key.path=value, such as training.steps=20."
            key, equals, value = given.partition("=")
        else:
            (key, value), equals = given, "="
            text, example = f"{key}={value!r}", "a key.path, such as training.steps."
        self.overrides.append(text)
        try:
            if not equals or not all(key.split(".")):
                raise BadOverride(f"expected {example}")
            self._replace(self._path(key), parse_yaml(value, text) if isinstance(given, str) else Tree(value, text))
        except BrokenYAML as error:
            self.mistakes.append(Mistake((), text, f"broken YAML: {error}"))
        except BadOverride as error:
            self.mistakes.append(Mistake((), text, str(error)))

    def _replace(self, path: KeyPath, new: "Tree") -> None:
        """Replace the value at a path. Missing sections above it are added, with the same origin."""
        origin = new.origins[()]
        for depth in range(1, len(path)):
            above = path[:depth]
            section: Any = [] if isinstance(path[depth], int) else {}
            if not isinstance(at(self.values, above), type(section)):
                self._set(above, Tree(section, origin))
            elif isinstance(self.origins.get(above), str):
                self.origins[above] = origin
        self._set(path, new)
        self.mistakes = [mistake for mistake in self.mistakes if mistake.path[: len(path)] != path]
        self.mistakes += [mistake._replace(path=(*path, *mistake.path)) for mistake in new.mistakes]

    def _path(self, key: str) -> KeyPath:
        """Return the path of a dotted key; an index may be that of a new last entry."""
        path: KeyPath = ()
        for word in key.split("."):
            above = at(self.values, path)
            is_index = word.isdecimal() and not isinstance(above, dict)
            if is_index and int(word) > (len(above) if isinstance(above, list) else 0):
                name = dotted(path)
                raise BadOverride(f"{name} has no entry {word} here. Give the whole list: '{name}=[...]'")
            path = (*path, int(word) if is_index else word)
        return path

    def _set(self, path: KeyPath, new: "Tree") -> None:
        section, key = at(self.values, path[:-1]), path[-1]
        if isinstance(section, list) and key == len(section):
            section.append(new.values)
        else:
            section[key] = new.values
        self.origins = {key: origin for key, origin in self.origins.items() if key[: len(path)] != path}
        self.origins |= {(*path, *key): origin for key, origin in new.origins.items()}


def dotted(path: KeyPath) -> str:
    """Return a path as the user writes it: text.sources.0.weight."""
    return ".".join(str(part) if str(part).isprintable() else repr(part) for part in path)


def undotted(key: str) -> KeyPath:
    """Return the path of a user's key: numbers are indices of lists."""
    return tuple(int(part) if part.isdecimal() else part for part in key.split("."))


def at(values: Any, path: KeyPath) -> Any:
    """Return the value at a path, or None."""
    for part in path:
        try:
            values = values[part]
        except (LookupError, TypeError):
            return None
    return values


def parse_yaml(text: str, override: str | None = None) -> Tree:
    """Return the tree of a YAML text. The origins of its values are their lines, or the override that it is part of."""
    depths = accumulate({"[": 1, "{": 1, "]": -1, "}": -1}.get(character, 0) for character in text)
    if max(depths, default=0) > MAX_DEPTH:
        raise BrokenYAML(1, "it is nested too deeply.")
    builder = _Builder(override)
    try:
        if root := builder.yaml.compose(text):
            builder.tree.values = builder.value(root, ())
        return builder.tree
    except MarkedYAMLError as error:
        raise BrokenYAML(error.problem_mark.line + 1, _problem(error)) from None
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise BrokenYAML(line, f"the character {chr(error.character)!r} is not allowed in YAML.") from None
    except RecursionError:
        raise BrokenYAML(1, "it is nested too deeply.") from None


def write_yaml(values: dict[str, Any]) -> str:
    """Return plain values as YAML."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]  # declared as None
    # ruamel writes this line break unescaped, and reads it back as a different one.
    yaml.allow_unicode = "\x85" not in json.dumps(values, ensure_ascii=False, default=str)
    yaml.width = 4096  # folded lines would make long paths hard to read and to search
    text = io.StringIO()
    yaml.dump(values, text)
    return text.getvalue()


class _Builder:
    """Builds the tree of a document from its nodes. A node is built again at each alias, so that no value is shared."""

    def __init__(self, override: str | None):
        self.yaml = YAML(typ="safe", pure=True)
        self.yaml.composer.warn_double_anchors = False  # YAML allows them: an alias stands for the nearest above
        self.tree = Tree(origin=1 if override is None else override)
        self._override = override
        self._size = 0

    def value(self, node: Node, path: KeyPath) -> Any:
        self._size += VALUE_SIZE + (len(node.value) if isinstance(node, ScalarNode) else 0)
        if self._size > MAX_SIZE:
            raise BrokenYAML(1, f"written out, its aliases are more than {MAX_SIZE:,} characters. Write less of them.")
        if len(path) > MAX_DEPTH:
            raise BrokenYAML(_line(node), "it is nested too deeply. An alias cannot stand in the value it stands for.")
        if isinstance(node, MappingNode) and node.tag == STANDARD + "map":
            return self._section(node, path)
        if isinstance(node, SequenceNode) and node.tag == STANDARD + "seq":
            return [self._inner(child, child, (*path, index)) for index, child in enumerate(node.value)]
        if isinstance(node, ScalarNode) and node.tag in WORDS:
            return node.value
        if isinstance(node, ScalarNode) and node.tag in CONVERTED:
            try:
                return self.yaml.constructor.construct_object(node)
            except ValueError:
                text = node.value[:40]
                return self._mistake(path, node, f"'{text}' cannot be read. Write a number, a word or a list.")
        tag = str(node.tag).replace(STANDARD, "!!")
        return self._mistake(path, node, f"a recipe holds plain values only. Remove the tag {tag}.")

    def _section(self, node: MappingNode, path: KeyPath) -> dict[str, Any]:
        """Return a section. Its own keys override those that it merges by <<."""
        section: dict[str, Any] = {}
        first_lines: dict[str, int] = {}
        for key, child in sorted(node.value, key=lambda pair: pair[0].tag != MERGE):
            if not isinstance(key, ScalarNode):
                self._mistake(path, key, "a key must be a single word.")
                continue
            word = key.value
            inner = self._merged(child, path) if key.tag == MERGE else self._inner(key, child, (*path, word))
            section |= inner if key.tag == MERGE else {word: inner}
            if word in first_lines:
                self._mistake((*path, word), key, f"given twice, first on line {first_lines[word]}. Keep one of them.")
            first_lines.setdefault(word, _line(key))
        return section

    def _merged(self, node: Node, path: KeyPath) -> dict[str, Any]:
        """Return the sections that a merge key includes as one. The first of several that have a key sets it."""
        merged: dict[str, Any] = {}
        for child in reversed(node.value if isinstance(node, SequenceNode) else [node]):
            section = self.value(child, path)
            if isinstance(section, dict):
                merged |= section
            else:
                self._mistake((*path, "<<"), child, "only sections can be merged.")
        return merged

    def _inner(self, start: Node, node: Node, path: KeyPath) -> Any:
        """Return a value in a section or list, which begins at `start`."""
        self.tree.origins[path] = self._origin(start)
        return self.value(node, path)

    def _mistake(self, path: KeyPath, node: Node, message: str) -> Any:
        self.tree.mistakes.append(Mistake(path, self._origin(node), message))
        return UNREADABLE

    def _origin(self, node: Node) -> Origin:
        return self._override or _line(node)


def _line(node: Node) -> int:
    return int(node.start_mark.line) + 1


def _problem(error: MarkedYAMLError) -> str:
    """Return the parser's error as one line, with a remedy for frequent mistakes."""
    words = ", ".join(filter(None, (error.context, error.problem)))
    if "'\\t'" in words:
        return f"{words}. Indent with spaces."
    if "mapping values are not allowed" in words:
        return f"{words}. A text that holds ': ' needs quotes. Indent the entries of a section alike."
    if "expected <block end>" in words:
        return f"{words}. Indent the entries of a section alike."
    return f"{words}."
