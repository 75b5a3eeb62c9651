"""A document of sections and blocks: one self-contained HTML page, or Markdown with its plots beside it."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files

from gem_core.report.table import Table


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Items:
    """A list of sentences."""

    items: Sequence[str]


@dataclass(frozen=True)
class Facts:
    """Names and what they stand for."""

    facts: Mapping[str, str]


@dataclass(frozen=True)
class Tables:
    """Tables by title, side by side where there is room."""

    tables: Mapping[str, Table]


@dataclass(frozen=True)
class Plot:
    """An SVG; `name` is its file's beside a Markdown report."""

    name: str
    svg: str
    caption: str


@dataclass(frozen=True)
class Code:
    """A text shown as it is, folded away under its title where the format can."""

    title: str
    text: str


Block = Text | Items | Facts | Tables | Plot | Code | Table


@dataclass(frozen=True)
class Section:
    """A heading and what is under it."""

    heading: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Document:
    """`subtitle` says in one line what the document is about."""

    title: str
    subtitle: str
    sections: Sequence[Section]

    def plots(self) -> dict[str, str]:
        """SVG by file name."""
        blocks = (block for section in self.sections for block in section.blocks)
        return {f"{block.name}.svg": block.svg for block in blocks if isinstance(block, Plot)}

    def html(self) -> str:
        """One page that loads nothing."""
        style = files("gem_core.report").joinpath("style.css").read_text()
        parts = [f"<header><h1>{escape(self.title)}</h1><p>{escape(self.subtitle)}</p></header>"]
        for section in self.sections:
            blocks = "".join(_HTML[type(block)](block) for block in section.blocks)
            parts.append(f"<section><h2>{escape(section.heading)}</h2>{blocks}</section>")
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{escape(self.title)}</title><style>{style}</style></head><body>{''.join(parts)}</body></html>\n"
        )

    def markdown(self, plots: str) -> str:
        """Markdown; `plots` is the folder of the files of `plots()`, as seen from the document."""
        parts = [f"# {self.title}", self.subtitle]
        for section in self.sections:
            parts.append(f"## {section.heading}")
            for block in section.blocks:
                parts.append(_plot_markdown(block, plots) if isinstance(block, Plot) else _MARKDOWN[type(block)](block))
        return "\n\n".join(parts) + "\n"


def _facts_html(block: Facts) -> str:
    return f"<dl>{''.join(f'<dt>{escape(k)}</dt><dd>{escape(v)}</dd>' for k, v in block.facts.items())}</dl>"


def _tables_html(block: Tables) -> str:
    each = "".join(f"<div><h3>{escape(title)}</h3>{table.html()}</div>" for title, table in block.tables.items())
    return f'<div class="beside">{each}</div>'


def _plot_html(block: Plot) -> str:
    # An image of its own, not inline SVG: ids of one drawing cannot meet those of another.
    data = base64.b64encode(block.svg.encode()).decode()
    image = f'<img alt="{escape(block.caption)}" src="data:image/svg+xml;base64,{data}">'
    return f"<figure>{image}<figcaption>{escape(block.caption)}</figcaption></figure>"


def _plot_markdown(block: Plot, folder: str) -> str:
    return f"![{block.caption}]({folder}/{block.name}.svg)\n\n*{block.caption}*"


_HTML: dict[type, Callable[..., str]] = {
    Text: lambda b: f"<p>{escape(b.text)}</p>",
    Items: lambda b: f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in b.items)}</ul>",
    Facts: _facts_html,
    Plot: _plot_html,
    Code: lambda b: f"<details><summary>{escape(b.title)}</summary><pre>{escape(b.text)}</pre></details>",
    Tables: _tables_html,
    Table: lambda b: f'<div class="wide">{b.html()}</div>',
}
_MARKDOWN: dict[type, Callable[..., str]] = {
    Text: lambda b: b.text,
    Items: lambda b: "\n".join(f"* {item}" for item in b.items),
    Facts: lambda b: "\n".join(f"* **{name}**: {value}" for name, value in b.facts.items()),
    Code: lambda b: f"{b.title}:\n\n```yaml\n{b.text.rstrip()}\n```",
    Tables: lambda b: "\n\n".join(f"### {title}\n\n{table.markdown()}" for title, table in b.tables.items()),
    Table: lambda b: b.markdown(),
}
