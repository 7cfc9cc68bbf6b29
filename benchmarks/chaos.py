"""Many kills: does every response still come once, with the tokens of an undisturbed run?

Four kinds of kills (SIGKILL, `--rows`), each at random moments and for each number format:

* parts of a fleet: rollouts on `--workers` engines with a KV pool, a draft server and reward workers, one after the
  other, until `--kills` processes have been killed: `--engine-kills` of them, at least half, engines that run responses
  (they take half a minute to come back), the others draft servers and reward workers. One response is longer than the
  others, and an engine that falls free drafts for it (`helps`) until it is over or one of the two is killed;
* drivers: `paceline rollout --workers` is killed `--driver-kills` times, each time soon after its engines have begun to
  generate, and begun again with --resume. A rollout that ends before it is killed is followed by another one;
* racers: of two workers that generate one response, by turns the one that copies it and the other one, `--racer-kills`
  in all;
* draft workers of an engine that has no other drafter, `--drafter-kills` of them, each of which had tokens of its own
  accepted in one of the last 50 steps.

Engines are compiled, as recipes and commands have it; loading the code takes 10 to 20 s of every start (`--eager`: not
compiled). A row ends after `--minutes` at the latest; `counts` says whether it had all its kills by then. `evidence` in
the JSON has, for each kill, what made it count: of a driver, the bytes of responses in its journal when it was started
and when it was killed. Every rollout is compared with an undisturbed one. `twice` and `missing` count responses that
came twice or not at all, `diverged` tokens that differ, `rewards` rewards that differ; `engines` kills that hit an
engine, `cut` responses that those engines were running; `kv_loads` chunks that found their keys and values in the KV
pool.
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
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import stragglers
from exactness import is_over, make_plain
from harness import Child, parser, print_bars, publish, save

from paceline.fleet.journal import _FRAME

ROOT = Path(__file__).resolve().parent.parent
MODEL = str(ROOT / "assets/countdown-policy")
DRAFTER = str(ROOT / "assets/countdown-drafter")
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
    "helps",
    "counts",
    "wall_s",
)
ROWS = ("parts", "drivers", "racers", "draft-workers")
LEAST_KILLS = {
    "parts": ("engines", 50),
    "drivers": ("kills", 4),
    "racers": ("kills", 25),
    "draft-workers": ("kills", 25),
}
"""The bars, in each number format: in which column, and how many."""
MISTAKES = ("twice", "missing", "diverged", "rewards")
"""Of each of these there may be none."""
MOST_PAUSE_S = 1.0
DRIVER_SAMPLES = 24
"""Responses per prompt where the driver is killed: there must be something left to do."""
MOST_WORK_S = 2.0
"""Longest time that a driver generates before it is killed."""
RECENT_STEPS = 50
"""A draft worker is killed only if its tokens were accepted so recently."""
KILL_CHANCE = 0.02
"""In each step of such an engine."""
NUM_STRAGGLERS = 2
"""Of a rollout with a race."""
MOST_RACE_S = 0.5
"""Longest time that a race lasts before one of the two is killed."""


class Killer:
    """Kills one process at a time; engines that run responses, and only while another one is up."""

    def __init__(self, fleet: Any, left: Counter[str], rng: random.Random) -> None:
        self.fleet, self.left, self.rng = fleet, left, rng
        self.done: Counter[str] = Counter()
        self.evidence: list[dict[str, Any]] = []
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
            self.evidence.append({"kind": kind, "running": num_running})

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
        states = {name: fleet._controller.state_of(name) for name in running}
        up = [name for name, state in states.items() if state in {"up", "drafting", "racing"}]
        busy = [name for name in up if running[name]]
        if len(up) < 2 or not busy:
            return None, 0
        name = self.rng.choice(busy)
        return fleet._actors.process(name), running[name]


def roll_out(
    fleet: Any, requests: list[Any], killer: Killer | RacerKiller | None, tally: Counter[str]
) -> dict[int, Any]:
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
    fleet.helps.take()
    killer, begin_s = Killer(fleet, left, random.Random(options.seed)), time.monotonic()
    while sum(left.values()) and not is_over(begin_s, options.minutes):
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
        "cut": sum(one["running"] for one in killer.evidence),
        "rollouts": num_rollouts,
        "responses": num_rollouts * len(requests),
        "tokens": num_tokens,
        **{name: tally[name] for name in ("twice", "missing", "diverged", "rewards")},
        "kv_loads": fleet.kv_pool_counters().hits,
        "helps": len(fleet.helps.take()),
        "preemptions": fleet.board.num_preemptions,
        "counts": not sum(left.values()),
        "evidence": killer.evidence,
        "wall_s": time.monotonic() - begin_s,
    }


@dataclass(frozen=True)
class Drive:
    """A `paceline rollout` that is killed and resumed, compiled or not as the fleet that it is compared with."""

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
        words += ["--workers", self.options.workers, "--chunk-tokens", 64, "--kv-cache-gib", 0.125]
        words += ["--eager" if self.options.eager else "--compiled"]
        command = [sys.executable, "-m", "paceline.cli", *map(str, words)]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def count_bytes(self) -> int:
        """What its journal has of responses; the head, which it has before the engines start, tells of none."""
        with contextlib.suppress(FileNotFoundError), (self.folder / "o.jsonl.progress").open("rb") as file:
            head = file.read(_FRAME.size)
            if len(head) == _FRAME.size:
                num_bytes, _ = _FRAME.unpack(head)
                return max(os.fstat(file.fileno()).st_size - len(head) - int(num_bytes), 0)
        return 0

    def run(self, rng: random.Random, *, is_killed: bool) -> dict[str, int] | None:
        """One life of the driver; returns what made its kill count, None if it came to its end."""
        before, driver = self.count_bytes(), self.start()
        while is_killed and driver.poll() is None:
            if self.count_bytes() > before:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    driver.wait(rng.uniform(0.0, MOST_WORK_S))
                break
            time.sleep(0.01)
        reached = self.count_bytes()
        is_struck = is_killed and reached > before and driver.poll() is None
        if is_struck:
            driver.kill()
        code = driver.wait()
        if code and not (is_struck and code == -signal.SIGKILL):
            raise SystemExit(f"paceline rollout ended with exit code {code}")
        return {"kept_bytes": before, "killed_at_bytes": reached} if code else None

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
    evidence: list[dict[str, Any]] = []
    rng, begin_s = random.Random(options.seed), time.monotonic()
    while len(evidence) < options.driver_kills and not is_over(begin_s, options.minutes):
        with tempfile.TemporaryDirectory() as folder:
            drive = Drive(Path(folder), dtype, options)
            lines = [json.dumps({"id": i, "prompt_ids": prompt}) for i, prompt in enumerate(prompts)]
            (drive.folder / "prompts.jsonl").write_text("\n".join(lines))
            while kill := drive.run(rng, is_killed=len(evidence) < options.driver_kills):
                evidence.append(kill)
                print(f"{len(evidence)} drivers", file=sys.stderr, flush=True)
            found = drive.read()
        named = {(line["id"], line["sample"]): tuple(line["tokens"]) for line in found}
        tally["rollouts"] += 1
        tally["responses"] += len(found)
        tally["tokens"] += sum(map(len, named.values()))
        tally["twice"] += len(found) - len(named)
        tally["missing"] += len(wanted.keys() - named.keys())
        tally["diverged"] += sum(count_differences(wanted[name], named[name]) for name in named)
    return describe_kills("driver", tally, evidence, options.driver_kills, begin_s)


@dataclass
class RacerKiller:
    """Kills one of two workers that generate the same response, by turns the copy and the other one."""

    fleet: Any
    rng: random.Random
    evidence: list[dict[str, Any]] = field(default_factory=list)
    _since_s: float | None = None
    """When the present race was seen first."""
    _lasts_s: float = 0.0
    _has_killed: bool = False
    """One in a rollout: the other one has to end it."""

    def strike(self) -> None:
        """Look for a race, and kill once it has lasted for a while."""
        from paceline.planning.help import Help

        if self._has_killed:
            return
        controller, now_s = self.fleet._controller, time.monotonic()
        pairs = [pair for name in controller.workers for pair in controller.pairs_of(name)]
        race = next((pair for pair in pairs if pair.kind is Help.COPY), None)
        if race is None or not controller._workers[race.helper.worker].copies:
            self._since_s = None
        elif self._since_s is None:
            self._since_s, self._lasts_s = now_s, self.rng.uniform(0.0, MOST_RACE_S)
        elif now_s - self._since_s >= self._lasts_s:
            member = ("copy", "original")[len(self.evidence) % 2]
            victim = race.helper.worker if member == "copy" else race.helped.worker
            os.kill(self.fleet._actors.process(victim), signal.SIGKILL)
            self.evidence.append({"member": member, "worker": victim, "raced_s": now_s - self._since_s})
            self._has_killed = True


def kill_racers(dtype: str, options: argparse.Namespace) -> dict[str, Any]:
    """Rollouts in which one of two racing workers is killed."""
    from paceline.planning.help import Help

    tally: Counter[str] = Counter()
    with stragglers.start_fleet(
        MODEL, DRAFTER, dtype, options.max_tokens, compiled=not options.eager
    ) as fleet:
        requests = stragglers.straggling_requests(fleet, NUM_STRAGGLERS, options.max_tokens, options.seed)
        with stragglers.forced(Help.NOTHING):
            wanted = [response.tokens for response in stragglers.roll_out(fleet, requests)]
        evidence: list[dict[str, Any]] = []
        rng, begin_s = random.Random(options.seed), time.monotonic()
        while len(evidence) < options.racer_kills and not is_over(begin_s, options.minutes):
            fleet.reset_prefix_cache()
            killer = RacerKiller(fleet, rng, evidence)
            with stragglers.forced(Help.COPY):
                found = roll_out(fleet, requests, killer, tally)
                fleet.advance(0.0)  # who still helped rests
            tally["rollouts"] += 1
            count_rollout(tally, wanted, {index: one.response.tokens for index, one in found.items()})
            stragglers.await_workers(fleet)
            print(f"rollout {tally['rollouts']}: {len(evidence)} racers", file=sys.stderr, flush=True)
    return describe_kills("racer", tally, evidence, options.racer_kills, begin_s)


def kill_draft_workers(dtype: str, options: argparse.Namespace) -> dict[str, Any]:
    """Rollouts of an engine whose draft worker is killed."""
    from pairs import make_prompts
    from vllm import SamplingParams

    from paceline.config import EngineSettings
    from paceline.engine.rollout_engine import RolloutEngine
    from paceline.types import RolloutRequest

    prompts = make_prompts(MODEL, options.groups, 3)
    requests = [RolloutRequest(prompt, options.max_tokens, key=17 + at) for at, prompt in enumerate(prompts)]
    plain = Child("plain", make_plain, MODEL, dtype, not options.eager)
    plain.ready()
    wanted = plain.call(requests, True)
    plain.close()
    settings = EngineSettings(
        drafter="none",
        model_drafter=DRAFTER,
        draft_worker=True,
        batch_invariant=True,
        compiled=not options.eager,
    )
    tally: Counter[str] = Counter()
    evidence: list[dict[str, Any]] = []
    rng, params = random.Random(options.seed), SamplingParams(temperature=1.0, ignore_eos=True)
    with RolloutEngine(MODEL, settings, dtype=dtype, max_model_len=options.max_tokens + 64) as engine:
        link, killed, begin_s = engine.scheduler.loop.ahead.links[0], set[int](), time.monotonic()
        recent: deque[int] = deque(maxlen=RECENT_STEPS)
        while len(evidence) < options.drafter_kills and not is_over(begin_s, options.minutes):
            engine.reset_prefix_cache()
            found: dict[int, tuple[int, ...]] = {}
            for index, request in enumerate(requests):
                engine.submit(index, request, params)
            while engine.num_running():
                for event in engine.step():
                    if event.response:
                        tally["twice"] += event.index in found
                        found[event.index] = event.response.tokens
                accepted = [step.num_model_tokens for step in engine.take_observations()]
                if (
                    not link.is_there or link.child.pid in killed
                ):  # what is left of its drafts is another one's
                    recent.clear()
                    continue
                recent.extend(accepted)
                is_left = len(evidence) < options.drafter_kills
                if is_left and sum(recent) and rng.random() < KILL_CHANCE:
                    os.kill(link.child.pid, signal.SIGKILL)
                    killed.add(link.child.pid)
                    evidence.append({"steps": len(recent), "accepted_tokens": sum(recent)})
            tally["rollouts"] += 1
            tally["missing"] += len(requests) - len(found)
            count_rollout(tally, wanted, found)
            print(f"rollout {tally['rollouts']}: {len(evidence)} draft workers", file=sys.stderr, flush=True)
    return describe_kills("draft worker", tally, evidence, options.drafter_kills, begin_s)


def count_rollout(
    tally: Counter[str], wanted: Sequence[tuple[int, ...]], found: dict[int, tuple[int, ...]]
) -> None:
    """Compare a rollout, as far as it came, with the undisturbed one."""
    tally["responses"] += len(found)
    tally["tokens"] += sum(map(len, found.values()))
    tally["diverged"] += sum(count_differences(wanted[index], tokens) for index, tokens in found.items())


def describe_kills(
    what: str, tally: Counter[str], evidence: list[dict[str, Any]], wanted: int, begin_s: float
) -> dict[str, Any]:
    """The row of kills of one kind."""
    return {
        "case": f"{len(evidence)} {what}",
        "kills": len(evidence),
        **{key: tally[key] for key in ("rollouts", "responses", "tokens", "twice", "missing", "diverged")},
        "counts": len(evidence) >= wanted,
        "evidence": evidence,
        "wall_s": time.monotonic() - begin_s,
    }


def run(dtype: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All kinds of kills that are asked for, in one number format."""
    rows = run_fleet(dtype, options) if {"parts", "drivers"} & set(options.rows) else []
    if "racers" in options.rows:
        rows.append({"kind": "racers", **kill_racers(dtype, options)})
    if "draft-workers" in options.rows:
        rows.append({"kind": "draft-workers", **kill_draft_workers(dtype, options)})
    return [{"dtype": dtype, **row} for row in rows]


def run_fleet(dtype: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Kills of a fleet's parts, and of its driver."""
    from pairs import make_prompts
    from vllm import SamplingParams

    from paceline.config import EngineSettings, FleetSettings, RewardSettings
    from paceline.fleet.fleet import Fleet
    from paceline.planning.help import Help
    from paceline.types import RolloutRequest

    prompts = make_prompts(MODEL, options.groups, 3)

    def requests(samples: int) -> list[Any]:
        return [RolloutRequest(p, options.max_tokens, sample=s) for p in prompts for s in range(samples)]

    settings = FleetSettings(
        workers=options.workers,
        chunk_tokens=64,
        max_failed_starts=20,
        help="draft",
        rewards=RewardSettings(workers=2, max_crashes=100),
    )
    with Fleet(
        MODEL, settings, EngineSettings(model_drafter=DRAFTER, batch_invariant=True, compiled=not options.eager),
        dtype=dtype, max_model_len=options.max_tokens + 64, kv_cache_bytes=1 << 27,
        reward=lambda index, response: float(sum(response.tokens) + index),
    ) as fleet:  # fmt: skip
        rows: list[dict[str, Any]] = []
        if "parts" in options.rows:
            long, *others = requests(options.group_size)
            short = [replace(request, max_tokens=request.max_tokens // 4) for request in others]
            with stragglers.forced(Help.DRAFT):
                rows.append({"kind": "parts", **kill_parts(fleet, [long, *short], options)})
        num_drivers = options.driver_kills if "drivers" in options.rows else 0
        asked = requests(DRIVER_SAMPLES) if num_drivers else []
        calm = fleet.generate(asked, SamplingParams(temperature=1.0))
    wanted = {
        (index // DRIVER_SAMPLES, request.sample): response.tokens
        for index, (request, response) in enumerate(zip(asked, calm, strict=True))
    }
    if num_drivers:
        rows.append({"kind": "drivers", **kill_drivers(prompts, wanted, dtype, options)})
    return rows


def check_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The bars: enough kills, and every response came once and as undisturbed."""
    bars = []
    for row in rows:
        name = f"{row['kind']}, {row['dtype']}"
        if row["kind"] in LEAST_KILLS:
            column, needed = LEAST_KILLS[row["kind"]]
            bar = {"case": f"{name}: {column}", "needed": needed, "reached": row[column]}
            bars.append({**bar, "met": row[column] >= needed})
        mistakes = sum(row.get(column, 0) for column in MISTAKES)
        bars.append({"case": f"{name}: mistakes", "needed": 0, "reached": mistakes, "met": not mistakes})
    return bars


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS)
    made.add_argument(
        "--minutes", type=float, default=45.0, help="longest time for a row, in a number format"
    )
    made.add_argument("--kills", type=int, default=60, help="parts of a fleet, in each number format")
    made.add_argument(
        "--engine-kills", type=int, help="of them, half or more; default: 50, or as many as may be"
    )
    made.add_argument("--driver-kills", type=int, default=4, help="in each number format")
    made.add_argument("--racer-kills", type=int, default=25, help="in each number format")
    made.add_argument("--drafter-kills", type=int, default=25, help="in each number format")
    made.add_argument("--workers", type=int, default=2)
    made.add_argument("--groups", type=int, default=6)
    made.add_argument("--group-size", type=int, default=4)
    made.add_argument("--max-tokens", type=int, default=700)
    made.add_argument("--dtype", choices=["float32", "bfloat16"], nargs="+", default=["float32", "bfloat16"])
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--eager", action="store_true", help="no compiled steps")
    options = made.parse_args()
    half = -(-options.kills // 2)
    if options.engine_kills is None:
        options.engine_kills = max(half, min(LEAST_KILLS["parts"][1], options.kills))
    if not half <= options.engine_kills <= options.kills:
        made.error(
            f"--engine-kills {options.engine_kills}: {half} to {options.kills}, half of all kills or more"
        )
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows: list[dict[str, Any]] = []
    for dtype in options.dtype:
        rows += run(dtype, options)
        save("chaos", rows, options, bars=check_rows(rows))
    bars = check_rows(rows)
    publish("chaos", rows, COLUMNS, options, bars=bars)
    print_bars(bars)


if __name__ == "__main__":
    main()
