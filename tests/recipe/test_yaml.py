"""YAML as plain values: what each spelling means, where it stands, and what is refused."""

import pytest

from lmlong.recipe.yaml import UNREADABLE, BrokenYAML, at, dotted, parse_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("2E3", 2000.0),
        ("no", "no"),
        ("on", "on"),
        ("true", True),
        ("12:30", "12:30"),
        ("012", 12),
        ("1_000", 1000),
        ("2024-01-01", "2024-01-01"),
        ("~", None),
        ("=", "="),
        ("[a, {b: 1}]", ["a", {"b": 1}]),
        ("{1: x, true: y}", {"1": "x", "true": "y"}),
    ],
)
def test_value_is_plain(text: str, value: object) -> None:
    document = parse_yaml(text)
    assert document.values == value
    assert isinstance(document.values, type(value))
    assert document.mistakes == []


def test_keys_and_entries_have_lines() -> None:
    tree = parse_yaml("\na:\n  b: 1\n\n  c:\n    - x\n    - d: 2\n")
    paths = [("a",), ("a", "b"), ("a", "c", 0), ("a", "c", 1, "d")]
    assert [tree.origin(path) for path in paths] == [2, 3, 6, 7]
    assert tree.origin(("a", "c", 7)) == 5, "that of the list"
    assert tree.origin(("z",)) == 1


def test_own_keys_and_the_first_merged_section_win() -> None:
    document = parse_yaml("x: &x {a: 1, b: 1}\ny: &y {a: 2, c: 2}\nz:\n  <<: [*x, *y]\n  b: 3\n")
    assert document.values["z"] == {"a": 1, "b": 3, "c": 2}
    assert document.mistakes == []
    assert document.origin(("z", "c")) == 2
    assert document.origin(("z", "b")) == 5


PLAIN_VALUES = "a recipe holds plain values only. Remove the tag"


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("a: !!python/name:os.system x", (("a",), 1, f"{PLAIN_VALUES} !!python/name:os.system.")),
        ("a: !secret x", (("a",), 1, f"{PLAIN_VALUES} !secret.")),
        ("a: 1\nb: !!int x", (("b",), 2, "'x' cannot be read. Write a number, a word or a list.")),
        ("[a]: 1", ((), 1, "a key must be a single word.")),
        ("<<: 3", (("<<",), 1, "only sections can be merged.")),
    ],
)
def test_value_that_is_not_plain_is_refused(text: str, mistake: tuple[object, ...]) -> None:
    document = parse_yaml(text)
    assert document.mistakes == [mistake]
    if text.startswith("a: !"):
        assert document.values == {"a": UNREADABLE}


ALIKE = "Indent the entries of a section alike."
QUOTES = f"A text that holds ': ' needs quotes. {ALIKE}"
BLOCK = "while parsing a block mapping, expected <block end>, but found '<block mapping start>'"
TAB = "while scanning for the next token, found character '\\t' that cannot start any token. Indent with spaces."


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("a:\n  b: 1\n    c: 2\n", 3, f"mapping values are not allowed here. {QUOTES}"),
        ("a: 1\nb: c: d\n", 2, f"mapping values are not allowed here. {QUOTES}"),
        ("a:\n  b: 1\n c: 2\n", 3, f"{BLOCK}. {ALIKE}"),
        ("a:\n\tb: 1\n", 2, TAB),
        ("a: 1\n---\nb: 2\n", 2, "expected a single document in the stream, but found another document."),
        ("a: *b\n", 1, "found undefined alias 'b'."),
        ("b: 1\na: &a [*a, *a]\n", 2, "it is nested too deeply. An alias cannot stand in the value it stands for."),
        ("a: &a\n  b: 1\n  <<: *a\n", 1, "it is nested too deeply."),
        ("a: 1\nb: \x07\n", 2, "the character '\\x07' is not allowed in YAML."),
        ("[" * 5000, 1, "it is nested too deeply."),
    ],
)
def test_broken_yaml_names_the_line(text: str, line: int, message: str) -> None:
    with pytest.raises(BrokenYAML) as caught:
        parse_yaml(text)
    assert (caught.value.line, str(caught.value)) == (line, message)


def test_alias_is_the_last_anchor_of_its_name(recwarn: pytest.WarningsRecorder) -> None:
    assert parse_yaml("a: &x 1\nb: *x\nc: &x 2\nd: *x\n").values == {"a": 1, "b": 1, "c": 2, "d": 2}
    assert not recwarn.list


@pytest.mark.parametrize("double", ["[*{0}, *{0}]", "{{<<: [*{0}, *{0}], {0}: *{0}}}"])
def test_aliases_cannot_grow_without_bound(double: str) -> None:
    lines = ["x0: &x0 {a: 1}"] + [f"x{n}: &x{n} {double.format(f'x{n - 1}')}" for n in range(1, 60)]
    with pytest.raises(BrokenYAML, match="written out, its aliases are more than"):
        parse_yaml("\n".join(lines))
    with pytest.raises(BrokenYAML, match="written out, its aliases are more than"):
        parse_yaml(f"a: {{<<: [{', '.join(line.partition(': ')[2] for line in lines)}]}}")
    assert len(parse_yaml("\n".join(lines[:8])).values) == 8


def test_paths_are_written_with_dots() -> None:
    assert dotted(("text", "sources", 0, "a\nb")) == "text.sources.0.'a\\nb'"
    assert at({"a": [{"b": 1}]}, ("a", 0, "b")) == 1
    assert at({"a": [{"b": 1}]}, ("a", 1, "b")) is None
    assert at({"a": 1}, ("a", "b")) is None
