"""The shell of every page: one self-contained document, light and dark, whose figures `charts.js` draws."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import msgspec

from paceline.record.whole_file import write_text
from paceline.report.figures import Drawing

HERE = Path(__file__).parent


def document(title: str, body: str, data: str) -> str:
    """The page. body: trusted HTML; data: what `embed` made of the figures."""
    style = (HERE / "style.css").read_text(encoding="utf-8")
    script = (HERE / "charts.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def embed(data: Mapping[str, Drawing]) -> str:
    """JSON that cannot end its script element."""
    text = msgspec.json.encode(data).decode()
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def canvas(name: str) -> str:
    """Where the figure of this name is drawn."""
    fallback = "<noscript>The figure needs JavaScript.</noscript>"
    return f'<div class="chart" data-figure="{escape(name)}">{fallback}</div>'


def facts_table(facts: Mapping[str, Any]) -> str:
    """Names and values as a table of two columns."""
    if not facts:
        return '<p class="none">None recorded.</p>'
    lines = "".join(
        f'<tr><th scope="row">{escape(k)}</th><td>{escape(str(v))}</td></tr>' for k, v in facts.items()
    )
    return f'<table class="facts-table">{lines}</table>'


def write_page(path: Path, text: str) -> None:
    """Write the page, whole or not at all. Raises RecordError when it cannot be written."""
    write_text(text, path)
