"""How long does the simulator take? A step of 100,000 responses of up to 20k tokens on 512 GPUs, in one process.

The scenario is DAPO-32B-20K on 512 GPUs. `cpu_s` is processor time of one core, `peak_mib` the memory of the
process so far, Python and NumPy included.
"""

from __future__ import annotations

import resource
import time
from typing import Any

from harness import parser, publish

from paceline.sim.rollout import simulate_rollout
from paceline.sim.scenario import build_system, load_scenario

SYSTEMS = ("veRL", "vanilla speculation", "SpecActor", "Seer", "TLT", "Paceline")
COLUMNS = ("system", "responses", "gpus", "cpu_s", "wall_s", "peak_mib", "rollout_s")


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--responses", type=int, nargs="+", default=[25_600, 102_400])
    made.add_argument("--gpus", type=int, default=512)
    made.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=list(SYSTEMS))
    options = made.parse_args()
    rows: list[dict[str, Any]] = []
    for responses in options.responses:
        scenario = load_scenario("specactor-dapo-32b", [f"gpus={options.gpus}", f"groups={responses // 16}"])
        work = scenario.draw(scenario.length_distribution(), 0)
        for name in options.systems:
            system = build_system(name, scenario)
            cpu, wall = time.process_time(), time.perf_counter()
            result = simulate_rollout(system.plan, work)
            rows.append(
                {
                    "system": name,
                    "responses": work.num_responses,
                    "gpus": options.gpus,
                    "cpu_s": time.process_time() - cpu,
                    "wall_s": time.perf_counter() - wall,
                    "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
                    "rollout_s": result.rollout_s,
                }
            )
            print(rows[-1], flush=True)
    publish("simulator", rows, COLUMNS, options)


if __name__ == "__main__":
    main()
