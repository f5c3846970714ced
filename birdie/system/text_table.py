"""Tables as text with aligned columns, and as HTML for notebooks."""

import html
from collections.abc import Iterable, Sequence

Row = Sequence[str]


def as_text(rows: Sequence[Row], left: int = 0) -> str:
    """Return rows of cells, the header first, as lines; the first `left` columns are aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    align = [str.ljust if index < left else str.rjust for index in range(len(widths))]
    return "\n".join(
        "  ".join(one(cell, width) for one, cell, width in zip(align, row, widths, strict=True)).rstrip()
        for row in rows
    )


def as_html(title: str, rows: Sequence[Row], lines: Iterable[str] = (), left: int = 0) -> str:
    """Return a table with a title above and lines below it; cells may hold anything."""
    header, *body = rows
    parts = [f"<table><caption>{html.escape(title)}</caption>", _cells("th", header, left)]
    parts += [_cells("td", row, left) for row in body]
    return "".join([*parts, "</table>", *(f"<p>{html.escape(line)}</p>" for line in lines)])


def _cells(tag: str, row: Row, left: int) -> str:
    cells = (
        f'<{tag} style="text-align:{"left" if index < left else "right"}">{html.escape(cell)}</{tag}>'
        for index, cell in enumerate(row)
    )
    return f"<tr>{''.join(cells)}</tr>"
