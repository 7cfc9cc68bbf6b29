"""Draw the README's picture, docs/images/tail.svg, from benchmarks/results/speed.json.

    python scripts/draw_tail.py            # draw it
    python scripts/draw_tail.py --check    # fail if it is not what the results say (part of `make lint`)

Running responses over time in the first rollout of 8 prompts x 16 responses: plain vLLM, made to generate as many
tokens in each response as Paceline, and Paceline. Both lines fall where a response ended in the measured run.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PICTURE = ROOT / "benchmarks/results/speed.json", ROOT / "docs/images/tail.svg"
CASE = "8x16"
LINES = (("plain", "plain vLLM", "#8a8f98"), ("paceline", "Paceline", "#d9480f"))
WIDTH, HEIGHT = 720, 300
LEFT, RIGHT, TOP, BOTTOM = 52, 20, 24, 44


def nice_step(span: float, most: int) -> float:
    """The smallest of 1, 2, 5 times a power of ten that cuts `span` into at most `most` parts."""
    unit = 10.0 ** math.floor(math.log10(span / most))
    return next(unit * times for times in (1, 2, 5, 10) if span / (unit * times) <= most)


def staircase(ends_s: Sequence[float], x_scale: float, y_scale: float) -> str:
    """The path of a line that begins at all responses and falls by one where each ends."""
    bottom, y = HEIGHT - BOTTOM, HEIGHT - BOTTOM - len(ends_s) * y_scale
    path = [f"M{LEFT} {y:.1f}"]
    for left, end in zip(range(len(ends_s) - 1, -1, -1), sorted(ends_s), strict=True):
        path.append(f"H{LEFT + end * x_scale:.1f}V{bottom - left * y_scale:.1f}")
    return "".join(path)


def draw(rollouts: Sequence[tuple[str, str, Sequence[float]]]) -> str:
    """The picture. rollouts: (label, colour, when each response ended in seconds)."""
    last = max(ends_s[-1] for _, _, ends_s in rollouts)
    most = max(len(ends_s) for _, _, ends_s in rollouts)
    x_scale, y_scale = (WIDTH - LEFT - RIGHT) / last, (HEIGHT - TOP - BOTTOM) / most
    bottom = HEIGHT - BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'font-family="system-ui, sans-serif" font-size="13" fill="#7a7f87">',
        "<title>Responses still running over time</title>",
    ]
    for count in (0, most // 2, most):
        y = bottom - count * y_scale
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#7a7f87" stroke-opacity="0.25"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{count}</text>')
    step = nice_step(last, 8)
    for at in range(int(last / step) + 1):
        x = LEFT + at * step * x_scale
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{at * step:g}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" text-anchor="end">seconds</text>')
    parts.append(f'<text x="8" y="{TOP - 8}">responses still running</text>')
    for row, (label, colour, ends_s) in enumerate(rollouts):
        parts.append(
            f'<path d="{staircase(ends_s, x_scale, y_scale)}" fill="none" stroke="{colour}" stroke-width="2.2"/>'
        )
        parts.append(
            f'<text x="{WIDTH - RIGHT}" y="{TOP + 24 + 20 * row}" text-anchor="end" fill="{colour}" font-weight="600">'
            f"{label}: {ends_s[-1]:.0f} s</text>"
        )
    return "\n".join([*parts, "</svg>", ""])


def read_rollouts(file: Path) -> list[tuple[str, str, list[float]]]:
    """The first rollout of each line's system, compiled, as the result file has it."""
    rows = json.loads(file.read_text())["rows"]
    found = {row["system"]: row for row in rows if row["case"] == CASE and row.get("mode") == "compiled"}
    return [(label, colour, found[system]["ends_s"][0][0]) for system, label, colour in LINES]


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--check", action="store_true", help="write nothing; fail if the picture is stale")
    options = made.parse_args()
    picture = draw(read_rollouts(RESULTS))
    if not options.check:
        PICTURE.parent.mkdir(parents=True, exist_ok=True)
        PICTURE.write_text(picture)
    elif not PICTURE.is_file() or PICTURE.read_text() != picture:
        sys.exit(
            f"{PICTURE.relative_to(ROOT)} is not what {RESULTS.name} says: run python scripts/draw_tail.py"
        )


if __name__ == "__main__":
    main()
