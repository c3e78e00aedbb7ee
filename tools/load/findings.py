"""The findings of a load test: figures and faults."""

from typing import Any, NamedTuple


class Figure(NamedTuple):
    """A measured value."""

    name: str
    value: float
    unit: str = ""


class Findings:
    """The figures and faults of one command."""

    def __init__(self) -> None:
        self.figures: list[Figure] = []
        self.wrong: list[str] = []
        """Faults, which no slow or busy machine excuses."""

    def add(self, name: str, value: float, unit: str = "") -> None:
        self.figures.append(Figure(name, value, unit))

    def require(self, holds: bool, fault: str) -> None:
        if not holds:
            self.wrong.append(fault)

    @property
    def body(self) -> dict[str, Any]:
        return {"figures": [figure._asdict() for figure in self.figures], "wrong": self.wrong}

    def lines(self) -> list[str]:
        """Return the lines of a report."""
        lines = [f"{number(value):>12} {unit:8} {name}" for name, value, unit in self.figures]
        return [*lines, *(f"WRONG: {fault}" for fault in self.wrong[:20]), f"{len(self.wrong):,} faults"]


def number(value: float) -> str:
    """Return a number with about three digits after the point, or none where it is whole."""
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 1000 else f"{value:,.4g}"
