"""The page: HTML and CSS in one file that loads nothing, for screens from a phone's on, dark mode and paper."""

import html
from collections.abc import Sequence
from dataclasses import dataclass

from birdie.system.names import shown


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page.

    Attributes:
        title: its heading, as text.
        body: its HTML, made by the functions of this module.
    """

    title: str
    body: str


_STYLE = """
:root { color-scheme: light dark; --ink: #1d2430; --paper: #fbfbf9; --card: #fff; --line: #dcdfe4; --soft: #5c6674; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e7ec; --paper: #14171c; --card: #1c2027; --line: #343b46; --soft: #9aa5b4; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1rem clamp(.8rem, 3vw, 2.5rem) 4rem; background: var(--paper);
  color: var(--ink); font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 1.2rem 0 .3rem; }
h2 { font-size: 1.15rem; margin: 2.4rem 0 .7rem; padding-top: .7rem; border-top: 1px solid var(--line); }
p { margin: .4rem 0 .8rem; max-width: 65ch; }
.soft, figcaption, dt { color: var(--soft); }
figcaption { font-size: .85rem; }
.grid { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 26rem), 1fr)); }
figure { margin: 0; padding: .8rem; background: var(--card); border: 1px solid var(--line); border-radius: .6rem; }
figure svg { display: block; width: 100%; height: auto; }
figcaption b { display: block; color: var(--ink); font-size: .95rem; }
.scroll { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: .6rem;
  margin: .6rem 0; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: .4rem .7rem; text-align: right; white-space: nowrap; border-top: 1px solid var(--line); }
tr:first-child th { border-top: 0; }
th { color: var(--soft); font-weight: 600; vertical-align: bottom; }
.text { text-align: left; }
.mark { display: inline-block; width: .8em; height: .8em; border-radius: 50%; margin-right: .45em;
  vertical-align: -.05em; }
.key { display: flex; flex-wrap: wrap; gap: .2rem 1rem; margin: .4rem 0 .8rem; padding: 0; list-style: none;
  font-size: .9rem; }
pre { margin: .6rem 0; padding: .8rem; white-space: pre-wrap; background: var(--card); border: 1px solid var(--line);
  border-radius: .6rem; font-size: .85rem; }
@media print {
  :root { --ink: #000; --paper: #fff; --card: #fff; --line: #bbb; --soft: #444; }
  body { max-width: none; padding: 0; font-size: 10pt; }
  .scroll { overflow: visible; }
  figure, pre, tr { break-inside: avoid; }
  h2 { break-after: avoid; }
}
"""


def render(title: str, subtitle: str, sections: Sequence[Section]) -> str:
    """Return the page."""
    parts = [f"<section><h2>{text(one.title)}</h2>\n{one.body}\n</section>" for one in sections]
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        f'<h1>{text(title)}</h1>\n<p class="soft">{text(subtitle)}</p>\n'
        + "\n".join(parts)
        + "\n</main>\n</body>\n</html>\n"
    )


def text(value: object) -> str:
    """Return a value as HTML text; control characters, which a browser would drop or obey, are escaped."""
    return html.escape(shown(value, keep="\n\t"))


def paragraph(words: str) -> str:
    """Return a paragraph of text."""
    return f"<p>{text(words)}</p>"


def preformatted(words: str) -> str:
    """Return text whose line breaks count."""
    return f"<pre>{text(words)}</pre>"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1, marks: Sequence[str] = ()) -> str:
    """Return a table that scrolls in its box where it is too wide.

    Args:
        head: names of the columns, with units.
        rows: cells as text.
        left: number of first columns that are aligned left, as text is; the others are numbers. Columns without any
            value are left out.
        marks: color of each row, as the figures have it.
    """

    kept = [index for index in range(len(head)) if index == 0 or any(row[index] for row in rows)]
    left = sum(index < left for index in kept)
    head, rows = [head[index] for index in kept], [[row[index] for index in kept] for row in rows]

    def cells(row: Sequence[str], tag: str, mark: str = "") -> str:
        dot = f'<span class="mark" style="background:{mark}"></span>' if mark else ""
        opened = [f'<{tag} class="text">' if index < left else f"<{tag}>" for index in range(len(row))]
        opened[0] += dot
        return "".join(f"{start}{text(cell)}</{tag}>" for start, cell in zip(opened, row, strict=True))

    lines = [f"<tr>{cells(head, 'th')}</tr>"]
    colors = [*marks, *[""] * (len(rows) - len(marks))]
    lines += [f"<tr>{cells(row, 'td', color)}</tr>" for row, color in zip(rows, colors, strict=True)]
    return '<div class="scroll"><table>\n' + "\n".join(lines) + "\n</table></div>"


def figure(svg: str, title: str, caption: str = "") -> str:
    """Return a figure; its title is also what a screen reader says."""
    return (
        f"<figure><figcaption><b>{text(title)}</b>{text(caption)}</figcaption>"
        f'<div role="img" aria-label="{text(title)}">{svg}</div></figure>'
    )


def grid(figures: Sequence[str]) -> str:
    """Return figures side by side where there is room."""
    return '<div class="grid">' + "\n".join(figures) + "</div>"


def key(names: Sequence[str], colors: Sequence[str]) -> str:
    """Return the legend that the figures below it share."""
    items = (
        f'<li><span class="mark" style="background:{color}"></span>{text(name)}</li>'
        for name, color in zip(names, colors, strict=True)
    )
    return f'<ul class="key">{"".join(items)}</ul>'
