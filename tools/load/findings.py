"""The findings of a load test: figures, some with bounds, and faults."""

from typing import Any, NamedTuple


class Figure(NamedTuple):
    """A measured value."""

    name: str
    value: float
    unit: str = ""
    bound: str = ""
    holds: bool = True


class Findings:
    """The figures and faults of one command."""

    def __init__(self) -> None:
        self.figures: list[Figure] = []
        self.wrong: list[str] = []
        """Faults, which no slow or busy machine excuses."""

    def add(self, name: str, value: float, unit: str = "") -> None:
        self.figures.append(Figure(name, value, unit))

    def bound(self, name: str, value: float, unit: str = "", *, most: float | None = None, least: float = 0.0) -> None:
        """Add a figure, and whether it is within its bounds."""
        bound = f"at least {least:g}" if most is None else f"at most {most:g}"
        self.figures.append(Figure(name, value, unit, bound, value >= least and (most is None or value <= most)))

    def require(self, holds: bool, fault: str) -> None:
        if not holds:
            self.wrong.append(fault)

    @property
    def body(self) -> dict[str, Any]:
        return {"figures": [figure._asdict() for figure in self.figures], "wrong": self.wrong}

    def lines(self) -> list[str]:
        """Return the lines of a report."""
        rows = [(name, f"{number(value)} {unit}".rstrip(), *rest) for name, value, unit, *rest in self.figures]
        widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
        lines = []
        for name, value, bound, holds in rows:
            verdict = f"   {bound}: {'holds' if holds else 'MISSED'}" if bound else ""
            lines.append(f"{name:<{widths[0]}}  {value:>{widths[1]}}{verdict}")
        return [*lines, *(f"WRONG: {fault}" for fault in self.wrong[:20]), f"{len(self.wrong):,} faults"]


def number(value: float) -> str:
    """Return a number with about three digits after the point, or none where it is whole."""
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 1000 else f"{value:,.4g}"
