"""Many kills: does every response still come once, with the tokens of an undisturbed run?

Two kinds of kills (SIGKILL), each at random moments and for each number format:

* parts of a fleet: rollouts on `--workers` engines with a KV pool, a draft server and reward workers, one after the
  other, until `--kills` processes have been killed: `--engine-kills` of them, at least half, engines that run responses
  (they take half a minute to come back), the others draft servers and reward workers;
* drivers: `paceline rollout --workers` is killed `--driver-kills` times, each time soon after its engines have begun to
  generate, and begun again with --resume. A rollout that ends before it is killed is followed by another one.

Every rollout is compared with an undisturbed one. `twice` and `missing` count responses that came twice or not at
all, `diverged` tokens that differ, `rewards` rewards that differ; `engines` kills that hit an engine, `cut` responses
that those engines were running; `kv_loads` chunks that found their keys and values in the KV pool.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import parser, publish

ROOT = Path(__file__).resolve().parent.parent
MODEL = str(ROOT / "assets/countdown-policy")
COLUMNS = (
    "case",
    "dtype",
    "kills",
    "engines",
    "cut",
    "rollouts",
    "responses",
    "tokens",
    "twice",
    "missing",
    "diverged",
    "rewards",
    "kv_loads",
    "wall_s",
)
MOST_PAUSE_S = 1.0
DRIVER_SAMPLES = 24
"""Responses per prompt where the driver is killed: there must be something left to do."""
MOST_WORK_S = 2.0
"""Longest time that a driver generates before it is killed."""


class Killer:
    """Kills one process at a time; engines that run responses, and only while another one is up."""

    def __init__(self, fleet: Any, left: Counter[str], rng: random.Random) -> None:
        self.fleet, self.left, self.rng = fleet, left, rng
        self.done: Counter[str] = Counter()
        self.num_cut = 0
        """Responses that killed engines were running."""
        self._killed: set[int] = set()
        self._next_s = 0.0

    def strike(self) -> None:
        kinds = [kind for kind, count in self.left.items() for _ in range(count)]
        now_s = time.monotonic()
        if not kinds or now_s < self._next_s:
            return
        self._next_s = now_s + self.rng.uniform(0.0, MOST_PAUSE_S)
        kind = self.rng.choice(kinds)
        process, num_running = self._choose(kind)
        if process is None or process in self._killed:  # dead already, and nobody knows yet
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
            self._killed.add(process)
            self.left[kind] -= 1
            self.done[kind] += 1
            self.num_cut += num_running

    def _choose(self, kind: str) -> tuple[int | None, int]:
        """A process, and how many responses it runs; None: there is none to be killed now."""
        fleet = self.fleet
        if kind == "draft server":
            child = fleet._draft_server.child
            return (int(child.pid) if child._process.poll() is None else None), 0
        if kind == "reward worker":
            processes = fleet._rewards.processes
            return (int(self.rng.choice(processes)) if processes else None), 0
        running = {name: len(worker.chunks) for name, worker in fleet._controller._workers.items()}
        up = [name for name in running if fleet._controller.state_of(name) == "up"]
        busy = [name for name in up if running[name]]
        if len(up) < 2 or not busy:
            return None, 0
        name = self.rng.choice(busy)
        return fleet._actors.process(name), running[name]


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


def count_differences(mine: Sequence[int], theirs: Sequence[int]) -> int:
    """Tokens in which two responses differ; where one of them ends, the other's further ones."""
    return sum(a != b for a, b in zip(mine, theirs, strict=False)) + abs(len(mine) - len(theirs))


def kill_parts(fleet: Any, requests: list[Any], options: argparse.Namespace) -> dict[str, Any]:
    """Rollouts of one fleet until all kills have been."""
    engines = options.engine_kills
    others = options.kills - engines
    left = Counter({"engine": engines, "draft server": others // 2, "reward worker": others - others // 2})
    tally: Counter[str] = Counter()
    num_tokens = num_rollouts = 0
    wanted = roll_out(fleet, requests, None, tally)
    killer, begin_s = Killer(fleet, left, random.Random(options.seed)), time.monotonic()
    while sum(left.values()):
        found = roll_out(fleet, requests, killer, tally)
        num_rollouts += 1
        for index, one in wanted.items():
            theirs = found[index]
            num_tokens += len(theirs.response.tokens)
            tally["diverged"] += count_differences(one.response.tokens, theirs.response.tokens)
            tally["rewards"] += one.reward.value != theirs.reward.value
        print(f"rollout {num_rollouts}: {dict(killer.done)}", file=sys.stderr, flush=True)
    return {
        "case": ", ".join(f"{count} {kind}" for kind, count in killer.done.items()),
        "kills": sum(killer.done.values()),
        "engines": killer.done["engine"],
        "cut": killer.num_cut,
        "rollouts": num_rollouts,
        "responses": num_rollouts * len(requests),
        "tokens": num_tokens,
        **{name: tally[name] for name in ("twice", "missing", "diverged", "rewards")},
        "kv_loads": fleet.kv_pool_counters().hits,
        "preemptions": fleet.board.num_preemptions,
        "wall_s": time.monotonic() - begin_s,
    }


@dataclass(frozen=True)
class Drive:
    """A `paceline rollout` that is killed and resumed, eager as the fleet that it is compared with."""

    folder: Path
    dtype: str
    options: argparse.Namespace

    @property
    def out(self) -> Path:
        """Where the responses go."""
        return self.folder / "o.jsonl"

    def start(self) -> subprocess.Popen[bytes]:
        words = ["rollout", MODEL, self.folder / "prompts.jsonl", "--out", self.out, "--resume"]
        words += ["--samples", DRIVER_SAMPLES, "--max-tokens", self.options.max_tokens, "--dtype", self.dtype]
        words += ["--workers", self.options.workers, "--chunk-tokens", 64, "--kv-cache-gib", 0.125, "--eager"]
        command = [sys.executable, "-m", "paceline.cli", *map(str, words)]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def count_bytes(self) -> int:
        """What is written so far, finished or not."""
        files = (self.out, self.folder / "o.jsonl.progress")
        return sum(file.stat().st_size for file in files if file.exists())

    def run(self, rng: random.Random, *, is_killed: bool) -> bool:
        """One life of the driver; returns whether it was killed before its end."""
        before, driver = self.count_bytes(), self.start()
        while is_killed and driver.poll() is None:
            if self.count_bytes() != before:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    driver.wait(rng.uniform(0.0, MOST_WORK_S))
                break
            time.sleep(0.01)
        if is_killed and driver.poll() is None:
            driver.kill()
        code = driver.wait()
        if code not in (0, -signal.SIGKILL):
            raise SystemExit(f"paceline rollout ended with exit code {code}")
        return code != 0

    def read(self) -> list[dict[str, Any]]:
        """The responses."""
        return [json.loads(line) for line in self.out.read_text().splitlines()]


def kill_drivers(
    prompts: list[tuple[int, ...]],
    wanted: dict[tuple[Any, int], Any],
    dtype: str,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Rollouts of the command until the driver has been killed often enough."""
    tally: Counter[str] = Counter()
    rng, begin_s = random.Random(options.seed), time.monotonic()
    while tally["kills"] < options.driver_kills:
        with tempfile.TemporaryDirectory() as folder:
            drive = Drive(Path(folder), dtype, options)
            lines = [json.dumps({"id": i, "prompt_ids": prompt}) for i, prompt in enumerate(prompts)]
            (drive.folder / "prompts.jsonl").write_text("\n".join(lines))
            while drive.run(rng, is_killed=tally["kills"] < options.driver_kills):
                tally["kills"] += 1
                print(f"{tally['kills']} drivers", file=sys.stderr, flush=True)
            found = drive.read()
        named = {(line["id"], line["sample"]): tuple(line["tokens"]) for line in found}
        tally["rollouts"] += 1
        tally["responses"] += len(found)
        tally["tokens"] += sum(map(len, named.values()))
        tally["twice"] += len(found) - len(named)
        tally["missing"] += len(wanted.keys() - named.keys())
        tally["diverged"] += sum(count_differences(wanted[name], named[name]) for name in named)
    return {"case": f"{tally['kills']} driver", **tally, "wall_s": time.monotonic() - begin_s}


def run(dtype: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Both kinds of kills in one number format."""
    from pairs import make_prompts
    from vllm import SamplingParams

    from paceline.config import EngineSettings, FleetSettings, RewardSettings
    from paceline.fleet.fleet import Fleet
    from paceline.types import RolloutRequest

    prompts = make_prompts(MODEL, options.groups, 3)

    def requests(samples: int) -> list[Any]:
        return [RolloutRequest(p, options.max_tokens, sample=s) for p in prompts for s in range(samples)]

    settings = FleetSettings(
        workers=options.workers,
        chunk_tokens=64,
        max_failed_starts=20,
        rewards=RewardSettings(workers=2, max_crashes=100),
    )
    with Fleet(
        MODEL, settings, EngineSettings(batch_invariant=True), dtype=dtype, max_model_len=options.max_tokens + 64,
        kv_cache_bytes=1 << 27, reward=lambda index, response: float(sum(response.tokens) + index),
    ) as fleet:  # fmt: skip
        rows = [kill_parts(fleet, requests(options.group_size), options)]
        asked = requests(DRIVER_SAMPLES) if options.driver_kills else []
        calm = fleet.generate(asked, SamplingParams(temperature=1.0))
    wanted = {
        (index // DRIVER_SAMPLES, request.sample): response.tokens
        for index, (request, response) in enumerate(zip(asked, calm, strict=True))
    }
    if options.driver_kills:
        rows.append(kill_drivers(prompts, wanted, dtype, options))
    return [{"dtype": dtype, **row} for row in rows]


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--kills", type=int, default=60, help="in each number format, drivers apart")
    made.add_argument("--engine-kills", type=int, help="of them; default: half, and no fewer")
    made.add_argument("--driver-kills", type=int, default=4, help="in each number format")
    made.add_argument("--workers", type=int, default=2)
    made.add_argument("--groups", type=int, default=6)
    made.add_argument("--group-size", type=int, default=4)
    made.add_argument("--max-tokens", type=int, default=700)
    made.add_argument("--dtype", choices=["float32", "bfloat16"], nargs="+", default=["float32", "bfloat16"])
    made.add_argument("--seed", type=int, default=0)
    options = made.parse_args()
    half = -(-options.kills // 2)
    options.engine_kills = half if options.engine_kills is None else options.engine_kills
    if not half <= options.engine_kills <= options.kills:
        made.error(
            f"--engine-kills {options.engine_kills}: {half} to {options.kills}, half of all kills or more"
        )
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    publish("chaos", [row for dtype in options.dtype for row in run(dtype, options)], COLUMNS, options)


if __name__ == "__main__":
    main()
