"""YAML 1.2 as plain values with their line numbers, for messages about mistakes.

Only sections, lists, text, numbers, booleans and null are built from the text.
"""

from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any, NamedTuple

from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer, ComposerError
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.events import AliasEvent
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

KeyPath = tuple[str | int, ...]
"""The path of a value: keys of sections and indices of lists, from the top."""

Origin = int | str
"""Where a value comes from: its line in a file, or the override that set it."""

UNREADABLE = object()
"""Stands for a value that is not plain YAML; a mistake of the document reports it."""

MAX_SIZE = 1 << 20
"""Maximum number of characters and values in a recipe, with its aliases expanded."""

MAX_DEPTH = 200
"""Maximum depth of nested brackets; the parser takes seconds for thousands of them."""

STANDARD = "tag:yaml.org,2002:"
WORDS = {STANDARD + name for name in ("str", "timestamp", "value", "merge")}
CONVERTED = {STANDARD + name for name in ("null", "bool", "int", "float")}


class Section(dict[str, Any]):
    """A section of a recipe, with the origins of its keys."""

    def __init__(self, values: Mapping[str, Any] = {}, origins: Mapping[str, Origin] = {}):
        super().__init__(values)
        self.origins = dict(origins)


class Entries(list[Any]):
    """A list in a recipe, with the origins of its entries by their index."""

    def __init__(self, values: Iterable[Any] = (), origins: Mapping[int, Origin] = {}):
        super().__init__(values)
        self.origins = dict(origins)


class Mistake(NamedTuple):
    """A mistake in a recipe."""

    path: KeyPath
    origin: Origin
    message: str


class ParsedYAML(NamedTuple):
    """The values of a YAML text, and the mistakes in values that could not be built."""

    values: Any
    mistakes: list[Mistake]


class BrokenYAML(Exception):
    """A text that is not YAML; `line` counts from 1."""

    def __init__(self, line: int, message: str):
        super().__init__(message)
        self.line = line


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


def origin_of(values: Any, path: KeyPath, origin: Origin) -> Origin:
    """Return the origin of the value at a path, or of the innermost section around it that has one.

    `origin` is the origin of `values` itself.
    """
    for depth, part in enumerate(path):
        origin = getattr(at(values, path[:depth]), "origins", {}).get(part, origin)
    return origin


def parse_yaml(text: str, origin: Origin | None = None) -> ParsedYAML:
    """Return the values of a YAML text; their origins are `origin`, or by default their lines."""
    depths = accumulate({"[": 1, "{": 1, "]": -1, "}": -1}.get(character, 0) for character in text)
    if max(depths, default=0) > MAX_DEPTH:
        raise BrokenYAML(1, "it is nested too deeply.")
    builder = _Builder(origin)
    try:
        root: Node | None = builder.yaml.compose(text)
        if root and _expanded_size(root, {}) > MAX_SIZE:
            raise BrokenYAML(1, f"written out, its aliases are more than {MAX_SIZE:,} characters. Write less of them.")
        return ParsedYAML(builder.value(root, ()) if root else None, builder.mistakes)
    except MarkedYAMLError as error:
        raise BrokenYAML(error.problem_mark.line + 1, _problem(error)) from None
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise BrokenYAML(line, f"the character {chr(error.character)!r} is not allowed in YAML.") from None
    except RecursionError:
        raise BrokenYAML(1, "it is nested too deeply.") from None


class _UniqueAnchors(Composer):
    """Refuses an anchor that is defined twice, about which ruamel.yaml only warns."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.parser.peek_event()
        if not isinstance(event, AliasEvent) and event.anchor in self.anchors:
            first = self.anchors[event.anchor].start_mark.line + 1
            why = f"the anchor &{event.anchor} is defined on line {first} already. Give it another name"
            raise ComposerError(None, None, why, event.start_mark)
        return super().compose_node(parent, index)


class _Builder:
    """Builds the values of a document from its nodes."""

    def __init__(self, origin: Origin | None):
        self.yaml = YAML(typ="safe", pure=True)
        self.yaml.Composer = _UniqueAnchors
        self.mistakes: list[Mistake] = []
        self._origin = origin
        # Aliases refer to one node; building it once keeps a small file from expanding into a huge one.
        self._built: dict[int, Any] = {}

    def value(self, node: Node, path: KeyPath) -> Any:
        if id(node) not in self._built:
            self._built[id(node)] = UNREADABLE
            self._built[id(node)] = self._build(node, path)
        elif self._built[id(node)] is UNREADABLE:
            self._mistake(path, node, "the alias stands for a value that cannot be read. Write the value out.")
        return self._built[id(node)]

    def _build(self, node: Node, path: KeyPath) -> Any:
        if isinstance(node, MappingNode) and node.tag == STANDARD + "map":
            return self._section(node, path)
        if isinstance(node, SequenceNode) and node.tag == STANDARD + "seq":
            values = [self.value(child, (*path, index)) for index, child in enumerate(node.value)]
            return Entries(values, {index: self._origin_of(child) for index, child in enumerate(node.value)})
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

    def _section(self, node: MappingNode, path: KeyPath) -> Section:
        """Return a section. Its own keys override merged ones, and sections merged earlier override later ones."""
        own, merged = Section(), Section()
        first_lines: dict[str, int] = {}
        for key, child in node.value:
            if not isinstance(key, ScalarNode):
                self._mistake(path, key, "a key must be a single word.")
                continue
            word = key.value
            if word in first_lines:
                self._mistake((*path, word), key, f"given twice, first on line {first_lines[word]}. Keep one of them.")
            first_lines.setdefault(word, key.start_mark.line + 1)
            if key.tag == STANDARD + "merge":
                for section in self._merged_sections(child, (*path, word)):
                    merged.update(section)
                    merged.origins.update(section.origins)
            else:
                own[word] = self.value(child, (*path, word))
                own.origins[word] = self._origin_of(key)
        return Section(merged | own, merged.origins | own.origins)

    def _merged_sections(self, node: Node, path: KeyPath) -> list[Section]:
        """Return the sections that a merge key `<<` includes, in reverse order."""
        sections = []
        for child in reversed(node.value if isinstance(node, SequenceNode) else [node]):
            if not isinstance(child, MappingNode):
                self._mistake(path, child, "only sections can be merged.")
            elif isinstance(section := self.value(child, path), Section):
                sections.append(section)
        return sections

    def _mistake(self, path: KeyPath, node: Node, message: str) -> Any:
        self.mistakes.append(Mistake(path, self._origin_of(node), message))
        return UNREADABLE

    def _origin_of(self, node: Node) -> Origin:
        return node.start_mark.line + 1 if self._origin is None else self._origin


def _expanded_size(node: Node, sizes: dict[int, int]) -> int:
    """Return the number of characters and values of a node with its aliases expanded; `sizes` caches them by node
    id."""
    if id(node) not in sizes:
        sizes[id(node)] = 0  # a recursive alias is reported when values are built
        parts = node.value if isinstance(node, MappingNode | SequenceNode) else ()
        inner = [part for pair in parts for part in (pair if isinstance(pair, tuple) else (pair,))]
        own = len(node.value) if isinstance(node, ScalarNode) else 0
        sizes[id(node)] = 1 + own + sum(_expanded_size(part, sizes) for part in inner)
    return sizes[id(node)]


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
