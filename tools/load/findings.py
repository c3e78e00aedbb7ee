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
        values = [f"{number(figure.value)} {figure.unit}".rstrip() for figure in self.figures]
        name_width = max((len(figure.name) for figure in self.figures), default=0)
        value_width = max(map(len, values), default=0)
        lines = []
        for figure, value in zip(self.figures, values, strict=True):
            verdict = f"   {figure.bound}: {'holds' if figure.holds else 'MISSED'}" if figure.bound else ""
            lines.append(f"{figure.name:<{name_width}}  {value:>{value_width}}{verdict}")
        return [*lines, *(f"WRONG: {fault}" for fault in self.wrong[:20]), f"{len(self.wrong):,} faults"]


def number(value: float) -> str:
    """Return a number with about three digits after the point, or none where it is whole."""
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 1000 else f"{value:,.4g}"
