"""The Trace Event Format as a viewer needs it: `check_trace` raises AssertionError where a trace breaks a rule.

Rules: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU and what Perfetto's importer does
with them: ids are 32-bit, slices of one track must nest, times are microseconds with at most nanoseconds behind the
point.
"""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec

REQUIRED = {
    "M": {"name": str, "pid": int, "args": dict},
    "X": {"name": str, "pid": int, "tid": int, "ts": float, "dur": float, "args": dict},
    "C": {"name": str, "pid": int, "ts": float, "args": dict},
    "i": {"name": str, "pid": int, "tid": int, "ts": float, "s": str},
}
METADATA = {
    "process_name": ("name", str),
    "thread_name": ("name", str),
    "thread_sort_index": ("sort_index", int),
}
MOST_US = 2**53 / 1e3
"""Beyond, nanoseconds no longer fit into a JSON number."""


def check_trace(path: Path) -> list[dict[str, Any]]:
    """Check a trace file by all rules; returns its events."""
    document = msgspec.json.decode(path.read_bytes())  # strict: no NaN, no trailing comma
    assert set(document) <= {"traceEvents", "displayTimeUnit", "otherData"}
    assert document.get("displayTimeUnit") in {"ms", "ns"}
    events: list[dict[str, Any]] = document["traceEvents"]
    for event in events:
        check_event(event)
    check_names(events)
    check_nesting(events)
    return events


def check_event(event: dict[str, Any]) -> None:
    """One event has the fields of its phase, of the right kind and size."""
    fields = REQUIRED[event["ph"]]
    assert set(fields) <= set(event), event
    assert set(event) <= {*fields, "ph", "tid", "args"}, event
    for name, kind in fields.items():
        value = event[name]
        if kind is float:
            assert isinstance(value, int | float), event
            assert not isinstance(value, bool), event
            assert math.isfinite(value), event
            assert 0 <= value <= MOST_US, event
        else:
            assert type(value) is kind, event
    for name in ("pid", "tid"):
        assert 0 < event.get(name, 1) < 2**31, event
    if event["ph"] == "i":
        assert event["s"] in {"g", "p", "t"}, event
    if event["ph"] == "C":
        assert event["args"], event
        assert all(type(value) in {int, float} for value in event["args"].values()), event
    if event["ph"] == "M":
        name, kind = METADATA[event["name"]]
        assert type(event["args"][name]) is kind, event
        if kind is int:
            assert abs(event["args"][name]) < 2**31, event


def check_names(events: list[dict[str, Any]]) -> None:
    """Processes and tracks are named once, before they are used."""
    named: set[tuple[Any, ...]] = set()
    for event in events:
        place = (event["pid"],) if event["name"] == "process_name" else (event["pid"], event.get("tid"))
        if event["ph"] == "M":
            if event["name"] != "thread_sort_index":
                assert place not in named, event
                named.add(place)
            continue
        assert (event["pid"],) in named, event
        if "tid" in event:
            assert place in named, event


def check_nesting(events: list[dict[str, Any]]) -> None:
    """Slices of a track come after one another or lie within one another, those around before those within."""
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            begin, length = round(1000 * event["ts"]), round(1000 * event["dur"])
            assert abs(begin - 1000 * event["ts"]) < 0.1, "finer than a nanosecond"
            tracks[event["pid"], event["tid"]].append((begin, begin + length, event))
    for slices in tracks.values():
        around: list[tuple[int, int, Any]] = []
        for one in sorted(slices, key=lambda one: one[0]):  # stable, as the importer sorts
            while around and around[-1][1] <= one[0]:
                around.pop()
            assert not around or one[1] <= around[-1][1], (around[-1][2], one[2])
            around.append(one)
