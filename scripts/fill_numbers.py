"""Fill the numbers of README.md and docs/*.md in from benchmarks/results/*.json.

    python scripts/fill_numbers.py           # write them
    python scripts/fill_numbers.py --check   # fail if one is stale, or has no file or row (part of `make lint`)

A number stands between two comments, which GitHub does not show:

    <!--n speed 8x16 paceline ratio .2f-->1.68<!--/n-->

The words are the result file; values that tell its row (none if it has one row); `sum`, `min`, `max`, `mean` or
`count` if several rows are meant; the column; the format. Blanks in a value are written `_`. The column `ratio_range.0`
is the first of a list. The source `papers.systems` is another list of the file than its rows. Formats are Python's
(`.2f`, `,d`, `.0%`, `s`), after one of FORMS if the number itself is not meant: `gain:.0f` of 1.06 is 6.

A whole table stands between `<!--table papers.claims-->` and `<!--/table-->`; scripts/tables.py makes them.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tables import TABLES

ROOT = Path(__file__).resolve().parent.parent
NUMBER = re.compile(r"<!--n ([^>]*?)-->(.*?)<!--/n-->", re.DOTALL)
TABLE = re.compile(r"<!--table ([\w.]+)-->\n(.*?)<!--/table-->", re.DOTALL)
OPENED = re.compile(r"<!--(?:n|table) ")
SUMMARIES: dict[str, Callable[[list[Any]], Any]] = {
    "sum": sum,
    "min": min,
    "max": max,
    "mean": statistics.fmean,
    "count": len,
}
FORMS: dict[str, Callable[[float], float]] = {
    "gain": lambda ratio: 100 * (ratio - 1),
    "inverse": lambda ratio: 1 / ratio,
    "percent": lambda share: 100 * share,
    "thousands": lambda count: count / 1000,
    "abs": abs,
}


class Unfilled(Exception):
    """A marker that names no number: what is wrong with it."""


class Results:
    """The result files of a folder, read once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, dict[str, Any]] = {}

    def rows(self, source: str) -> list[dict[str, Any]]:
        """The rows of `speed`, or another list of the file: `papers.systems`."""
        name, _, key = source.partition(".")
        if name not in self._files:
            path = self._folder / f"{name}.json"
            if not path.is_file():
                raise Unfilled(
                    f"there is no {path.name} in {self._folder.name}/: run its benchmark with --json"
                )
            self._files[name] = json.loads(path.read_text())
        rows = self._files[name].get(key or "rows")
        if not isinstance(rows, list):
            raise Unfilled(f"{name}.json has no list {key or 'rows'!r}")
        return rows


def find_value(results: Results, words: Sequence[str]) -> Any:
    """The number that file, row, summary and column name."""
    source, *selectors, column = words
    summary = selectors.pop() if selectors and selectors[-1] in SUMMARIES else None
    rows = [row for row in results.rows(source) if is_row(row, selectors)]
    values = [take(row, column) for row in rows]
    if summary is not None and values:
        return SUMMARIES[summary](values)
    if len(rows) != 1:
        raise Unfilled(f"{len(rows)} rows of {source} have {' '.join(selectors) or 'no words'}: name one row")
    return values[0]


def is_row(row: dict[str, Any], selectors: Sequence[str]) -> bool:
    """Whether each selector is a value of the row, blanks written as `_`, or `column=value`."""
    values = {str(value).replace(" ", "_") for value in row.values()}
    pairs = {f"{key}={str(value).replace(' ', '_')}" for key, value in row.items()}
    return all(selector in values or selector in pairs for selector in selectors)


def take(row: dict[str, Any], column: str) -> Any:
    """The value of a column; `ratio_range.0` goes into lists and objects."""
    value: Any = row
    for part in column.split("."):
        try:
            value = value[int(part)] if isinstance(value, list) else value[part]
        except (KeyError, IndexError, TypeError, ValueError):
            raise Unfilled(f"there is no {column!r} in the row: it has {', '.join(row)}") from None
    if value is None:
        raise Unfilled(f"{column!r} is empty in the row")
    return value


def show(value: Any, form: str) -> str:
    """The value as text: `.2f`, or `gain:.0f` with one of FORMS before."""
    before, colon, wanted = form.partition(":")
    if colon:
        if before not in FORMS:
            raise Unfilled(f"there is no form {before!r}: use {', '.join(FORMS)}")
        value = FORMS[before](value)
    try:
        return format(value, wanted if colon else form)
    except ValueError as error:
        raise Unfilled(f"{value!r} does not go with the format {form!r}: {error}") from None


def fill(text: str, results: Results) -> tuple[str, list[str]]:
    """(text with all numbers and tables as the results have them, what could not be filled)."""
    complaints: list[str] = []

    def guarded(marker: re.Match[str], make: Callable[[], str]) -> str:
        try:
            return make()
        except Unfilled as error:
            complaints.append(f"{marker[0].splitlines()[0]}: {error}")
            return marker[0]

    def number(marker: re.Match[str]) -> str:
        *words, form = marker[1].split()
        if len(words) < 2:
            raise Unfilled("write file, row, column and format")
        return f"<!--n {marker[1]}-->{show(find_value(results, words), form)}<!--/n-->"

    def table(marker: re.Match[str]) -> str:
        if marker[1] not in TABLES:
            raise Unfilled(f"there is no such table: scripts/tables.py has {', '.join(TABLES)}")
        return f"<!--table {marker[1]}-->\n\n{TABLES[marker[1]](results.rows)}\n\n<!--/table-->"

    num_opened = len(OPENED.findall(text))
    if num_opened != len(NUMBER.findall(text)) + len(TABLE.findall(text)):
        complaints.append("a marker is not closed: end numbers with <!--/n-->, tables with <!--/table-->")
    text = NUMBER.sub(lambda marker: guarded(marker, lambda: number(marker)), text)
    return TABLE.sub(lambda marker: guarded(marker, lambda: table(marker)), text), complaints


def main(words: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Fill or check all pages; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="change nothing, fail where something would change"
    )
    check = parser.parse_args(words).check
    results = Results(root / "benchmarks/results")
    failed = False
    for page in [root / "README.md", *sorted((root / "docs").rglob("*.md"))]:
        old = page.read_text()
        new, complaints = fill(old, results)
        for complaint in complaints:
            print(f"{page.relative_to(root)}: {complaint}", file=sys.stderr)
        failed |= bool(complaints)
        if new == old:
            continue
        if check:
            print(f"{page.relative_to(root)} is stale: run python scripts/fill_numbers.py", file=sys.stderr)
            failed = True
        else:
            page.write_text(new)
            print(f"{page.relative_to(root)}: filled")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
