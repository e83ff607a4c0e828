"""Plain aligned tables, and the list of targets with their results."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Target:
    """A goal of the design and its measured value. It is never asserted, because machines differ."""

    name: str
    wanted: str
    measured: str
    met: bool

    def row(self) -> tuple[str, str, str, str]:
        return self.name, self.wanted, self.measured, "met" if self.met else "MISSED"


def at_most(what: str, bound: float, measured: float, unit: str) -> Target:
    return Target(what, f"at most {bound:g} {unit}", f"{measured:.1f} {unit}", measured <= bound)


def at_least(what: str, bound: float, ratio: float) -> Target:
    return Target(what, f"at least {bound:g}x", f"{ratio:.2f}x", ratio >= bound)


def faster_than(what: str, ratio: float) -> Target:
    """`ratio` is the time of the peer divided by ours."""
    return Target(what, "above 1x", f"{ratio:.2f}x", ratio > 1)


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Align the first column left and all others right. An empty row is a blank line."""
    lines = [tuple(header), *(tuple(row) for row in rows)]
    widths = [max((len(line[at]) for line in lines if at < len(line)), default=0) for at in range(len(header))]
    drawn = ["  ".join(_cell(line, at, width) for at, width in enumerate(widths)).rstrip() for line in lines]
    rule = "-" * max(map(len, drawn))
    return "\n".join((title, "", drawn[0], rule, *drawn[1:], ""))


def targets(found: Sequence[Target]) -> str:
    return table("Targets", ("", "wanted", "measured", ""), [target.row() for target in found])


def _cell(line: Sequence[str], at: int, width: int) -> str:
    text = line[at] if at < len(line) else ""
    return text.ljust(width) if at == 0 else text.rjust(width)
