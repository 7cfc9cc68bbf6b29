"""What the papers measured, and what the simulator makes of it: every claim of every preset.

Each preset of `paceline simulate` is run with all its systems; a row is one published number beside ours.
`standing` says what the row is worth: `predicted` if all inputs were fixed before, `fitted` if constants were chosen to
meet the number, `implied` if it follows from other rows. Only predictions are counted, each version of a paper on its
own. `difference` is that of the number, `gain_difference` that of the gain (speed-up - 1).
docs/papers.md says what would have to be true where they differ.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any

from harness import parser, publish

from paceline.commands.simulate import run_scenario
from paceline.sim.scenario import load_scenario, preset_names

COLUMNS = ("preset", "claim", "of", "over", "published", "ours", "difference", "gain_difference", "standing")


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
                    "gain_difference": one.gain_difference,
                    "standing": one.claim.standing,
                    "source": one.claim.source,
                    "version": version_of(one.claim.source),
                }
            )
        print(f"{preset}: {time.perf_counter() - start:.0f} s", flush=True)
    return claims, systems


def version_of(source: str) -> str:
    """The paper's version that a source names: `v1` of `v1 6.2`; `only` where a paper has one."""
    first = source.partition(" ")[0].rstrip(":")
    return first if re.fullmatch(r"v\d", first) else "only"


def count_predictions(claims: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """How many predictions hold, for each paper's latest version and for earlier ones.

    within_15: of the number; gains, gains_within_25: of the predictions that are gains, of their gain.
    """
    latest: dict[str, str] = {}
    for claim in claims:
        paper = claim["preset"].partition("-")[0]
        latest[paper] = max(latest.get(paper, ""), claim["version"])
    rows = []
    for name, wanted in (("latest", True), ("earlier", False)):
        found = [
            claim
            for claim in claims
            if claim["standing"] == "predicted"
            and (claim["version"] == latest[claim["preset"].partition("-")[0]]) is wanted
        ]
        gains = [claim["gain_difference"] for claim in found if claim["gain_difference"] is not None]
        rows.append(
            {
                "versions": name,
                "predictions": len(found),
                "within_15": sum(abs(claim["difference"]) <= 0.15 for claim in found),
                "gains": len(gains),
                "gains_within_25": sum(abs(gain) <= 0.25 for gain in gains),
            }
        )
    return rows


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--presets", nargs="+", default=preset_names(), choices=preset_names())
    options = made.parse_args()
    claims, systems = measure(options.presets)
    publish("papers", claims, COLUMNS, options, systems=systems, counts=count_predictions(claims))


if __name__ == "__main__":
    main()
