"""Convert the main part of a DOCX to text. Each character is read once, however tables and text boxes are nested."""

from lmlong.data.converters import Broken

WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main "
COMPATIBILITY = "http://schemas.openxmlformats.org/markup-compatibility/2006 "

RUN, TEXT, ROW, CELL = (WORD + name for name in ("r", "t", "tr", "tc"))
SIGNS = {WORD + "tab": "\t", WORD + "br": "\n", WORD + "cr": "\n", WORD + "noBreakHyphen": "\u2011"}
LEFT_OUT = {
    WORD + "moveFrom",  # the same text is in the place that it was moved to
    COMPATIBILITY + "Fallback",  # for older programs, the content of the Choice before it
}

ONE_LINE = str.maketrans("\n\t", "  ")

DEEPEST = 200
"""Paragraphs, tables, cells and text boxes that may be open at once."""


class Blocks:
    """A body or a text box: paragraphs and tables."""

    def __init__(self) -> None:
        self._blocks: list[str] = []

    def add(self, blocks: list[str]) -> None:
        self._blocks.extend(filter(None, blocks))

    def text(self) -> list[str]:
        return self._blocks


class Cell(Blocks):
    """A cell, whose paragraphs and tables become one line."""

    def text(self) -> list[str]:
        return [" ".join(self._blocks).translate(ONE_LINE)]


class Paragraph:
    """Text, and the text boxes that are anchored in it and follow it."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self._boxes: list[str] = []

    def add(self, blocks: list[str]) -> None:
        self._boxes.extend(blocks)

    def text(self) -> list[str]:
        return ["".join(self.parts).strip("\n"), *self._boxes]


class Table:
    """Rows of cells."""

    def __init__(self) -> None:
        self.rows: list[list[str]] = []

    def add(self, blocks: list[str]) -> None:
        if not self.rows:
            self.rows.append([])
        self.rows[-1].extend(blocks)

    def text(self) -> list[str]:
        return ["\n".join("\t".join(row) for row in self.rows)]


Part = Blocks | Paragraph | Table

PARTS: dict[str, type[Part]] = {
    WORD + "body": Blocks,
    WORD + "txbxContent": Blocks,
    WORD + "p": Paragraph,
    WORD + "tbl": Table,
    CELL: Cell,
}


class WordText:
    """Collects the text of a document from its start tags, end tags and text."""

    def __init__(self) -> None:
        self._document = Blocks()
        self._parts: list[Part] = [self._document]  # that are open, the innermost last
        self._open: list[str] = [""]
        self._left_out = 0  # open elements from one of LEFT_OUT on

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        if self._left_out or tag in LEFT_OUT:
            self._left_out += 1
            return
        innermost = self._parts[-1]
        if tag in PARTS:
            if len(self._parts) > DEEPEST:
                raise Broken(f"it has more than {DEEPEST} tables and text boxes inside each other")
            self._parts.append(PARTS[tag]())
        elif tag == ROW and isinstance(innermost, Table):
            innermost.rows.append([])
        elif tag in SIGNS and self._open[-1] == RUN and isinstance(innermost, Paragraph):
            innermost.parts.append(SIGNS[tag])
        self._open.append(tag)

    def end(self, tag: str) -> None:
        if self._left_out:
            self._left_out -= 1
            return
        self._open.pop()
        if tag in PARTS:
            part = self._parts.pop()
            self._parts[-1].add(part.text())

    def data(self, text: str) -> None:
        innermost = self._parts[-1]
        if not self._left_out and self._open[-1] == TEXT and isinstance(innermost, Paragraph):
            innermost.parts.append(text)

    def text(self) -> str:
        """Return the text: a blank line between paragraphs and tables."""
        blocks = self._document.text()
        return "\n\n".join(blocks) + "\n" if blocks else ""
