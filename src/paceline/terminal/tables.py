"""Tables that fit a terminal of 80 columns: texts wrap at blanks, numbers stand right, nothing is cut."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table


def make_table(texts: Sequence[str], numbers: Sequence[str], *, title: str = "", caption: str = "") -> Table:
    """An empty table: columns of text, then columns of numbers. A heading may have several lines."""
    table = Table(
        title=title or None,
        caption=caption or None,
        box=None,
        padding=(0, 2, 0, 0),
        pad_edge=False,
        header_style="bold",
        title_justify="left",
        caption_justify="left",
    )
    for name in texts:
        table.add_column(name, overflow="fold", vertical="bottom")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table
