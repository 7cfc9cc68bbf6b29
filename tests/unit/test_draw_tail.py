"""The README's picture shows what was measured."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from draw_tail import BOTTOM, HEIGHT, LEFT, draw, nice_step, staircase


def test_a_line_falls_by_one_where_each_response_ended() -> None:
    path = staircase([1.0, 4.0, 2.0], x_scale=10.0, y_scale=5.0)
    x = [float(value) for value in re.findall(r"H([\d.]+)", path)]
    y = [float(value) for value in re.findall(r"V([\d.]+)", path)]
    assert x == [LEFT + 10.0, LEFT + 20.0, LEFT + 40.0]
    assert y == [HEIGHT - BOTTOM - 10.0, HEIGHT - BOTTOM - 5.0, HEIGHT - BOTTOM]


def test_the_picture_names_both_times() -> None:
    picture = draw([("plain", "#111111", [1.0, 40.4]), ("ours", "#222222", [1.0, 12.0])])
    text = "".join(ElementTree.fromstring(picture).itertext())
    assert "plain: 40 s" in text
    assert "ours: 12 s" in text


@pytest.mark.parametrize(("span", "step"), [(8.0, 1.0), (81.0, 20.0), (0.4, 0.05), (12.0, 2.0)])
def test_the_axis_has_round_steps(span: float, step: float) -> None:
    assert nice_step(span, 8) == pytest.approx(step)
