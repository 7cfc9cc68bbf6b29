"""What the papers measured, and what the simulator makes of it: every claim of every preset.

Each preset of `paceline simulate` is run with all its systems; a row is one published number beside ours.
`calibrated` says that constants of the preset were chosen to meet the number; all others are predictions.
docs/papers.md says what would have to be true where they differ.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from harness import parser, publish

from paceline.commands.simulate import run_scenario
from paceline.sim.scenario import load_scenario, preset_names

COLUMNS = ("preset", "claim", "of", "over", "published", "ours", "difference", "calibrated")


def measure(presets: Sequence[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(claims, systems) of the presets."""
    claims: list[dict[str, Any]] = []
    systems: list[dict[str, Any]] = []
    for preset in presets:
        start = time.perf_counter()
        scenario = load_scenario(preset)
        results, judged = run_scenario(preset, scenario, (), scenario.systems)
        first = next(iter(results.values()))
        systems += [
            {
                "preset": preset,
                "system": one.name,
                "rollout_s": one.rollout_s,
                "speedup": first.rollout_s / one.rollout_s,
                "step_speedup": first.step_s / one.step_s,
                "tail_s": one.tail_s,
                "idle_share": one.idle_share,
                "preemptions": one.preemptions,
                "note": one.note,
            }
            for one in results.values()
        ]
        for one in judged:
            to = f"-{one.claim.paper_to:g}" if one.claim.paper_to is not None else ""
            claims.append(
                {
                    "preset": preset,
                    "claim": one.claim.text,
                    "of": one.claim.of,
                    "over": one.claim.over,
                    "published": f"{one.claim.paper:g}{to}",
                    "ours": one.ours,
                    "difference": one.difference,
                    "calibrated": one.claim.calibrated,
                    "source": one.claim.source,
                }
            )
        print(f"{preset}: {time.perf_counter() - start:.0f} s", flush=True)
    return claims, systems


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--presets", nargs="+", default=preset_names(), choices=preset_names())
    options = made.parse_args()
    claims, systems = measure(options.presets)
    publish("papers", claims, COLUMNS, options.json, systems=systems)


if __name__ == "__main__":
    main()
