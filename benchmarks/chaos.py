"""Many kills: does every response still come once, with the tokens of an undisturbed run?

Rollouts on a fleet of `--workers` engines with a draft server and reward workers, one after another, while processes
are killed (SIGKILL) at random moments until `--kills` have been: `--engine-kills` of them engines, which take half a
minute to come back, the others draft servers and reward workers. Every rollout is compared with the undisturbed first
one. `twice` and `missing` count responses that came twice or not at all, `diverged` tokens that differ, `rewards`
rewards that differ.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from harness import parser, publish

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = (
    "case",
    "kills",
    "rollouts",
    "responses",
    "tokens",
    "twice",
    "missing",
    "diverged",
    "rewards",
    "wall_s",
)
MOST_PAUSE_S = 1.0


class Killer:
    """Kills one process at a time, engines only while another one is up."""

    def __init__(self, fleet: Any, left: Counter[str], rng: random.Random) -> None:
        self.fleet, self.left, self.rng = fleet, left, rng
        self.done: Counter[str] = Counter()
        self._next_s = 0.0

    def strike(self) -> None:
        kinds = [kind for kind, count in self.left.items() for _ in range(count)]
        now_s = time.monotonic()
        if not kinds or now_s < self._next_s:
            return
        self._next_s = now_s + self.rng.uniform(0.0, MOST_PAUSE_S)
        kind = self.rng.choice(kinds)
        process = self._choose(kind)
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):  # it has just been killed, and nobody knows yet
            os.kill(process, signal.SIGKILL)
            self.left[kind] -= 1
            self.done[kind] += 1

    def _choose(self, kind: str) -> int | None:
        fleet = self.fleet
        if kind == "draft server":
            return int(fleet._draft_server.pid) if fleet._draft_server._process.poll() is None else None
        if kind == "reward worker":
            processes = fleet._rewards.processes
            return int(self.rng.choice(processes)) if processes else None
        up = [status.name for status in fleet.board.workers.values() if status.state == "up"]
        return fleet._actors.process(self.rng.choice(up)) if len(up) > 1 else None  # type: ignore[no-any-return]


def roll_out(fleet: Any, requests: list[Any], killer: Killer | None, tally: Counter[str]) -> dict[int, Any]:
    """One rollout, with kills."""
    from vllm import SamplingParams

    found: dict[int, Any] = {}
    fleet.submit(requests, SamplingParams(temperature=1.0, ignore_eos=True))
    while fleet.num_unfinished:
        if killer is not None:
            killer.strike()
        for one in fleet.advance(0.02):
            tally["twice"] += one.index in found
            found[one.index] = one
    tally["missing"] += len(requests) - len(found)
    return found


def run(options: argparse.Namespace) -> dict[str, Any]:
    from speed import make_prompts

    from paceline.config import EngineSettings, FleetSettings, RewardSettings
    from paceline.fleet.rollout import Fleet
    from paceline.types import RolloutRequest

    model = str(ROOT / "assets/countdown-policy")
    requests = [
        RolloutRequest(prompt, options.max_tokens, sample=sample)
        for prompt in make_prompts(model, options.groups, 3)
        for sample in range(options.group_size)
    ]
    settings = FleetSettings(
        workers=options.workers,
        chunk_tokens=64,
        max_failed_starts=20,
        rewards=RewardSettings(workers=2, max_crashes=100),
    )
    engines = min(options.engine_kills, options.kills)
    others = options.kills - engines
    left = Counter({"engine": engines, "draft server": others // 2, "reward worker": others - others // 2})
    tally: Counter[str] = Counter()
    num_tokens = num_rollouts = 0
    with Fleet(
        model, settings, EngineSettings(), dtype=options.dtype, max_model_len=options.max_tokens + 64,
        kv_cache_bytes=1 << 27, reward=lambda index, response: float(sum(response.tokens) + index),
    ) as fleet:  # fmt: skip
        wanted = roll_out(fleet, requests, None, tally)
        killer, begin_s = Killer(fleet, left, random.Random(options.seed)), time.monotonic()
        while sum(left.values()):
            found = roll_out(fleet, requests, killer, tally)
            num_rollouts += 1
            for index, one in wanted.items():
                mine, theirs = one.response.tokens, found[index].response.tokens
                num_tokens += len(theirs)
                tally["diverged"] += sum(a != b for a, b in zip(mine, theirs, strict=True))
                tally["rewards"] += one.reward.value != found[index].reward.value
            print(f"rollout {num_rollouts}: {dict(killer.done)}", file=sys.stderr, flush=True)
        wall_s = time.monotonic() - begin_s
        preemptions = fleet.board.num_preemptions
    return {
        "case": ", ".join(f"{count} {kind}" for kind, count in killer.done.items()),
        "kills": sum(killer.done.values()),
        "rollouts": num_rollouts,
        "responses": num_rollouts * len(requests),
        "tokens": num_tokens,
        **{name: tally[name] for name in ("twice", "missing", "diverged", "rewards")},
        "preemptions": preemptions,
        "wall_s": wall_s,
    }


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--kills", type=int, default=200)
    made.add_argument("--engine-kills", type=int, default=20)
    made.add_argument("--workers", type=int, default=2)
    made.add_argument("--groups", type=int, default=6)
    made.add_argument("--group-size", type=int, default=4)
    made.add_argument("--max-tokens", type=int, default=700)
    made.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    made.add_argument("--seed", type=int, default=0)
    options = made.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    publish("chaos", [run(options)], COLUMNS, options.json)


if __name__ == "__main__":
    main()
