"""YAML 1.2 as plain values and their lines, so that a mistake can be reported with its line.

Only sections, lists, text, numbers, booleans and null are built from the text.
"""

from itertools import accumulate
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

KeyPath = tuple[str | int, ...]
"""The path of a value: keys of sections and indices of lists, from the top."""

UNREADABLE = object()
"""Stands for a value that is not plain YAML; the mistake is in the document's `mistakes`."""

LARGEST = 1 << 20
"""Limit of the characters and values of a recipe, with its aliases expanded."""

DEEPEST = 200
"""Limit of nested brackets; the parser takes seconds for thousands of them."""

STANDARD = "tag:yaml.org,2002:"
WORDS = {STANDARD + name for name in ("str", "timestamp", "value", "merge")}
CONVERTED = {STANDARD + name for name in ("null", "bool", "int", "float")}


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


class BrokenYAML(Exception):
    """A text that is not YAML; `line` counts from 1."""

    def __init__(self, line: int, message: str):
        super().__init__(message)
        self.line = line


class Document:
    """One YAML document: its `values`, and the `mistakes` (path, line, message) found while building them."""

    def __init__(self, text: str):
        self.mistakes: list[tuple[KeyPath, int, str]] = []
        # Aliases refer to one node; building it once keeps a small file from expanding into a huge one.
        self._built: dict[int, Any] = {}
        self._sections: dict[int, dict[str, tuple[int, Node]]] = {}
        self._yaml = YAML(typ="safe", pure=True)
        depths = accumulate({"[": 1, "{": 1, "]": -1, "}": -1}.get(character, 0) for character in text)
        if max(depths, default=0) > DEEPEST:
            raise BrokenYAML(1, "it is nested too deeply.")
        try:
            self._root: Node | None = self._yaml.compose(text)
            self._check_size()
            self.values: Any = self._value(self._root, ()) if self._root else None
        except MarkedYAMLError as error:
            raise BrokenYAML(error.problem_mark.line + 1, _problem(error)) from None
        except ReaderError as error:
            line = text.count("\n", 0, error.position) + 1
            raise BrokenYAML(line, f"the character {chr(error.character)!r} may not stand in YAML.") from None
        except RecursionError:
            raise BrokenYAML(1, "it is nested too deeply.") from None

    def line(self, path: KeyPath) -> tuple[int, bool]:
        """Return the line of a key or list entry, and True; if it is absent, that of its section, and False."""
        node, line = self._root, 1
        for part in path:
            if part not in (below := self._below(node)):
                return line, False
            line, node = below[part]
        return line, True

    def _check_size(self) -> None:
        """Refuse a text whose aliases, expanded, are far larger than any recipe."""
        sizes: dict[int, int] = {}

        def size(node: Node) -> int:
            if id(node) not in sizes:
                sizes[id(node)] = 0  # a recursive alias is reported when values are built
                parts = node.value if isinstance(node, MappingNode | SequenceNode) else ()
                inner = [part for pair in parts for part in (pair if isinstance(pair, tuple) else (pair,))]
                own = len(node.value) if isinstance(node, ScalarNode) else 0
                sizes[id(node)] = 1 + own + sum(size(part) for part in inner)
            return sizes[id(node)]

        if self._root and size(self._root) > LARGEST:
            raise BrokenYAML(1, f"written out, its aliases are more than {LARGEST:,} characters. Write less of them.")

    def _value(self, node: Node, path: KeyPath) -> Any:
        if id(node) not in self._built:
            self._built[id(node)] = UNREADABLE
            self._built[id(node)] = self._build(node, path)
        elif self._built[id(node)] is UNREADABLE:
            self._mistake(path, node, "the alias stands for a value that cannot be read. Write the value out.")
        return self._built[id(node)]

    def _build(self, node: Node, path: KeyPath) -> Any:
        if isinstance(node, MappingNode) and node.tag == STANDARD + "map":
            self._check_keys(node, path)
            return {key: self._value(child, (*path, key)) for key, (_, child) in self._section(node).items()}
        if isinstance(node, SequenceNode) and node.tag == STANDARD + "seq":
            return [self._value(child, (*path, index)) for index, child in enumerate(node.value)]
        if isinstance(node, ScalarNode) and node.tag in WORDS:
            return node.value
        if isinstance(node, ScalarNode) and node.tag in CONVERTED:
            try:
                return self._yaml.constructor.construct_object(node)
            except ValueError:
                return self._mistake(
                    path, node, f"'{node.value[:40]}' cannot be read. Write a number, a word or a list."
                )
        tag = str(node.tag).replace(STANDARD, "!!")
        return self._mistake(path, node, f"a recipe holds plain values only. Remove the tag {tag}.")

    def _check_keys(self, node: MappingNode, path: KeyPath) -> None:
        first: dict[str, int] = {}
        for key, value in node.value:
            word, line = str(key.value), key.start_mark.line + 1
            if not isinstance(key, ScalarNode):
                self._mistake(path, key, "a key must be a single word.")
            elif word in first:
                self._mistake((*path, word), key, f"given twice, first on line {first[word]}. Keep one of them.")
            elif _merges(key) and not all(isinstance(merged, MappingNode) for merged in _merged(value)):
                self._mistake((*path, word), key, "only sections can be merged.")
            first.setdefault(word, line)

    def _mistake(self, path: KeyPath, node: Node, message: str) -> Any:
        self.mistakes.append((path, node.start_mark.line + 1, message))
        return UNREADABLE

    def _section(self, node: MappingNode) -> dict[str, tuple[int, Node]]:
        """Return line and node of every key; own keys override merged ones, and the section merged first the later."""
        if id(node) in self._sections:
            return self._sections[id(node)]
        section = self._sections[id(node)] = {}
        for key, value in node.value:
            for merged in reversed(_merged(value)) if _merges(key) else ():
                section |= self._section(merged) if isinstance(merged, MappingNode) else {}
        for key, value in node.value:
            if isinstance(key, ScalarNode) and not _merges(key):
                section[key.value] = (key.start_mark.line + 1, value)
        return section

    def _below(self, node: Node | None) -> dict[Any, tuple[int, Node]]:
        """Return line and node of every child of a node."""
        if isinstance(node, MappingNode):
            return self._section(node)
        entries = node.value if isinstance(node, SequenceNode) else []
        return {index: (entry.start_mark.line + 1, entry) for index, entry in enumerate(entries)}


def _merges(key: Node) -> bool:
    return key.tag == STANDARD + "merge"


def _merged(node: Node) -> list[Node]:
    """Return the sections that a merge key `<<` includes."""
    return node.value if isinstance(node, SequenceNode) else [node]


def _problem(error: MarkedYAMLError) -> str:
    """Return the parser's error on one line, with the remedy for two frequent mistakes."""
    words = ", ".join(filter(None, (error.context, error.problem)))
    if "'\\t'" in words:
        return f"{words}. Indent with spaces."
    if "mapping values are not allowed" in words:
        return f"{words}. A text that holds ': ' needs quotes."
    return f"{words}."
