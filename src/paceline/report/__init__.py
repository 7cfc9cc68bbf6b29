"""The report of a run: `record.jsonl` in, one self-contained `report.html` out.

`history` reads the record in one pass, `figures` turns it into drawings, `headline` into the numbers on top,
`page` into HTML; `style.css` and `charts.js` are embedded. The page asks nothing of the network.
"""

from paceline.report.page import build_report

__all__ = ["build_report"]
