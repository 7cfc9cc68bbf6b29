"""A decision log with something changed, as a log of other planning would be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from paceline.record.decisions import DecisionLine, DecisionReader, DecisionWriter


def edit_log(
    path: Path,
    folder: Path,
    change: Callable[[int, DecisionLine], DecisionLine] = lambda _, line: line,
    settings: Mapping[str, Any] | None = None,
) -> Path:
    """Write the log anew into `folder`: each line, by its number from 0, as `change` gives it; other settings."""
    with DecisionReader(path) as reader:
        fields = reader.header.settings | dict(settings or {})
        writer = DecisionWriter.create(folder, msgspec.structs.replace(reader.header, settings=fields))
        for number, line in enumerate(reader):
            writer.write(change(number, line))
    writer.close()
    return writer.path
