"""What was found: figures, some beside what is wanted of them, and what is wrong."""

from typing import Any, NamedTuple


class Figure(NamedTuple):
    """Something that was measured."""

    name: str
    value: float
    unit: str = ""
    wanted: str = ""
    holds: bool = True


class Findings:
    """What one command has found."""

    def __init__(self) -> None:
        self.figures: list[Figure] = []
        self.wrong: list[str] = []
        """What no machine is too slow or too busy for."""

    def tell(self, name: str, value: float, unit: str = "") -> None:
        self.figures.append(Figure(name, value, unit))

    def want(self, name: str, value: float, unit: str = "", *, most: float | None = None, least: float = 0.0) -> None:
        """Tell a figure, and whether it is within its bounds."""
        wanted = f"at least {least:g}" if most is None else f"at most {most:g}"
        self.figures.append(Figure(name, value, unit, wanted, value >= least and (most is None or value <= most)))

    def must(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.wrong.append(otherwise)

    @property
    def body(self) -> dict[str, Any]:
        return {"figures": [figure._asdict() for figure in self.figures], "wrong": self.wrong}

    def lines(self) -> list[str]:
        """For a person to read."""
        told = [(name, f"{number(value)} {unit}".rstrip(), *rest) for name, value, unit, *rest in self.figures]
        widths = [max((len(line[column]) for line in told), default=0) for column in (0, 1)]
        lines = []
        for name, value, wanted, holds in told:
            verdict = f"   wanted {wanted}: {'holds' if holds else 'MISSED'}" if wanted else ""
            lines.append(f"{name:<{widths[0]}}  {value:>{widths[1]}}{verdict}")
        return [*lines, *(f"WRONG: {what}" for what in self.wrong[:20]), *[f"{len(self.wrong):,} things are wrong"]]


def number(value: float) -> str:
    """Return a number with about three digits after the point, or none where it is whole."""
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 1000 else f"{value:,.4g}"
