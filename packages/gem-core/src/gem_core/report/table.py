"""A table of figures, written once and shown as HTML, as Markdown or as plain text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

MISSING = "–"


@dataclass(frozen=True)
class Cell:
    """`best` marks the best of its column."""

    text: str
    best: bool = False


@dataclass(frozen=True)
class Section:
    """Rows under a heading of their own (none: ""). The first cell of a row names it, the others hold figures."""

    heading: str
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True)
class Table:
    """Named columns, rows in sections."""

    columns: tuple[str, ...]
    sections: tuple[Section, ...]

    def html(self) -> str:
        """A `<table>`."""
        head = "".join(f'<th scope="col">{escape(column)}</th>' for column in self.columns)
        bodies = []
        for section in self.sections:
            lines = []
            if section.heading:
                span = len(self.columns)
                lines.append(
                    f'<tr class="heading"><th scope="rowgroup" colspan="{span}">{escape(section.heading)}</th></tr>'
                )
            for first, *rest in section.rows:
                cells = "".join(f"<td{' class=best' if c.best else ''}>{escape(c.text)}</td>" for c in rest)
                lines.append(f'<tr><th scope="row">{escape(first.text)}</th>{cells}</tr>')
            bodies.append(f"<tbody>{''.join(lines)}</tbody>")
        return f"<table><thead><tr>{head}</tr></thead>{''.join(bodies)}</table>"

    def markdown(self) -> str:
        """Pipe tables, one per section, each under its heading."""
        head = [_pipes(self.columns), _pipes(["---", *["---:"] * (len(self.columns) - 1)])]
        parts = []
        for section in self.sections:
            lines = [_pipes([f"**{c.text}**" if c.best else c.text for c in row]) for row in section.rows]
            parts.append("\n".join([*([f"{section.heading}:", ""] if section.heading else []), *head, *lines]))
        return "\n\n".join(parts)

    def text(self) -> str:
        """Aligned columns; a star marks the best."""

        def cells(row: Sequence[Cell]) -> list[str]:
            return [row[0].text, *(f"{cell.text}{'*' if cell.best else ' '}" for cell in row[1:])]

        head = cells([Cell(column) for column in self.columns])
        sections = [(section.heading, [cells(row) for row in section.rows]) for section in self.sections]
        every = [head, *(row for _, rows in sections for row in rows)]
        widths = [max(len(row[i]) for row in every) for i in range(len(head))]

        def aligned(row: Sequence[str]) -> str:
            figures = zip(row[1:], widths[1:], strict=True)
            return "  ".join([f"{row[0]:<{widths[0]}}", *(f"{text:>{width}}" for text, width in figures)]).rstrip()

        lines = [aligned(head)]
        for heading, rows in sections:
            lines += [heading] if heading else []
            lines += [aligned(row) for row in rows]
        return "\n".join(lines)


def _pipes(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean."""
    return sum(values) / len(values)


def spread(values: Sequence[float]) -> float:
    """Standard deviation over seeds, of at least two values."""
    centre = mean(values)
    return float((sum((v - centre) ** 2 for v in values) / (len(values) - 1)) ** 0.5)


def figure(values: Sequence[float], digits: int = 4) -> str:
    """A mean, and where there are several seeds their standard deviation beside it."""
    if not values:
        return MISSING
    beside = f" ± {spread(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{beside}"
