"""What Paceline costs the host in each step, beyond vLLM's own scheduling: no model, no device, no kernel.

    python benchmarks/host_time.py [--json FILE] [--requests 1,64,256] [--steps 200] [--threads 2]

The engine is real up to its executor, which a stand-in replaces: it knows what each response will be, takes drafts as
far as they are right, and its time is not counted. `vllm` is plain vLLM, to which the stand-in gives ready drafts;
`paceline` is Paceline's engine, which drafts from suffix trees, chooses by its budget, learns from what was accepted,
and puts the drafts where model runner V2 reads them (its launches are plain CPU copies here). Groups of 8 responses
repeat a text, with one token in ten changed; up to 8 draft tokens for each request. The ready drafts are right so often
that both systems' responses grow by as many tokens a step. In the case `dear` a draft token takes the target so long
that none pays, and none is to be made; there plain vLLM has none either. The systems take turns; medians over steps.

The systems `overlapped` schedule each step while the one before is under way (model runner V2's schedulers, in Triton's
interpreter; vLLM's has its placeholders for drafts that stay on the device).

`cpu_ms` is the process's processor time, all threads, `wall_ms` the time that passes; `drafter_ms` of the latter goes
to the suffix trees, drafting and counting; it is left out where steps overlap, as a thread does that beside the rest.
`beyond_cpu_ms` and `beyond_wall_ms`: over those of `vllm` in the same case, left out where `tokens_per_request` differs
from its by more than a tenth, as where the budget made no drafts: the two do unlike work then.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from harness import ROOT, Child, Stopwatch, median, parser, publish

COLUMNS = (
    "requests", "case", "system", "policy", "cpu_ms", "wall_ms", "drafter_ms", "beyond_cpu_ms", "beyond_wall_ms",
    "drafts_per_request", "tokens_per_request",
)  # fmt: skip
NUM_DRAFTS = 8
GROUP = 8
PERIOD = 32
"""Tokens after which a group's text repeats itself."""
SHARED = 0.9
"""Share of a response's tokens that are those of its group."""
RIGHT = {False: 0.78, True: 0.69}
"""How often plain vLLM's ready draft tokens are right, by whether steps overlap. Paceline's own drafts of fixed length
bring 4.0 tokens a request and step at 64 and 256 requests, 3.1 where steps overlap; p**0 to p**NUM_DRAFTS add up to
that."""
ALIKE = 0.1
"""Share by which tokens a request and step may differ between systems that are compared."""
PROMPT_TOKENS = 16
WARM_UP = 60
"""Steps before those that count: a group's text has to be known for drafts to be right."""
DEAR_DRAFT_S = 1e-3
"""What a draft token takes the target in the case `dear`."""


@dataclass(frozen=True)
class System:
    """What is measured in a process of its own."""

    case: str
    policy: str | None
    """The budget's; None: plain vLLM."""
    overlaps: bool = False

    @property
    def is_dear(self) -> bool:
        """Whether no draft pays."""
        return self.case == "dear"

    def row(self, num_requests: int) -> dict[str, Any]:
        """The row's first columns."""
        system = ("paceline" if self.policy else "vllm") + " overlapped" * self.overlaps
        return {"requests": num_requests, "case": self.case, "system": system, "policy": self.policy}


SYSTEMS = (
    System("drafts", None), System("drafts", "fixed"), System("drafts", "marginal"),
    System("dear", None), System("dear", "marginal"),
)  # fmt: skip
"""Of each case plain vLLM first."""
OVERLAPPED = tuple(replace(made, overlaps=True) for made in SYSTEMS)


class Device:
    """Stands in for vLLM's executor: responses are known before; drafts are taken up to the first wrong token."""

    def __init__(
        self,
        texts: dict[tuple[int, ...], np.ndarray],
        put: Callable[[Any], None] | None,
        draft_s: float = 0.0,
        right: float = RIGHT[False],
    ) -> None:
        """texts: whole sequences by prompt. put: what the runner does with a step's drafts; None: give ready ones.

        draft_s: what a draft token takes. right: share of the ready draft tokens that are.
        """
        self.texts, self.put, self.draft_s, self.right = texts, put, draft_s, right
        self.own_s = self.own_cpu_s = 0.0
        self.num_drafts = self.num_tokens = 0
        self._place: dict[str, tuple[np.ndarray, int]] = {}
        self._random = np.random.default_rng(5)
        self._names: list[str] = []

    def execute_model(self, scheduled: Any, non_block: bool = False) -> Any:
        if self.put is not None:
            self.put(scheduled)
        began_s, cpu_s = time.perf_counter(), time.process_time()
        output = self._run(scheduled)
        if self.draft_s:
            time.sleep(self.draft_s * sum(map(len, scheduled.scheduled_spec_decode_tokens.values())))
        self.own_s += time.perf_counter() - began_s
        self.own_cpu_s += time.process_time() - cpu_s
        self._made = SimpleNamespace(result=lambda: output)
        return self._made

    def sample_tokens(self, *_: Any, **__: Any) -> Any:
        """Asked for where steps overlap."""
        return self._made

    def _run(self, scheduled: Any) -> Any:
        from vllm.v1.outputs import ModelRunnerOutput

        for new in scheduled.scheduled_new_reqs:
            prompt = tuple(new.prompt_token_ids)
            self._place[new.req_id] = (self.texts[prompt], len(prompt))
        self._names = list(scheduled.num_scheduled_tokens)
        made = []
        drafted = self._drafts(scheduled)
        for name in self._names:
            drafts = drafted.get(name, [])
            text, at = self._place[name]
            future = text[at : at + len(drafts) + 1].tolist()
            right = next((i for i, token in enumerate(drafts) if token != future[i]), len(drafts))
            made.append(future[: right + 1])
            self._place[name] = (text, at + right + 1)
            self.num_drafts += len(drafts)
            self.num_tokens += right + 1
        return ModelRunnerOutput(self._names, {n: i for i, n in enumerate(self._names)}, made)

    def _drafts(self, scheduled: Any) -> dict[str, list[int]]:
        """Draft tokens of each request, those that a device with overlapping steps would have, too."""
        from paceline.engine.runner import order_of

        given: dict[str, list[int]] = scheduled.scheduled_spec_decode_tokens
        if (ahead := order_of(scheduled).ahead) is not None:
            found = {}
            for row, name in enumerate(ahead.names):
                text, at = self._place[name]
                draft = ahead.tokens[row, 0, : ahead.num_tokens[row, 0]].tolist()
                decided = text[ahead.starts[row] : at].tolist()
                goes_on = draft[: len(decided)] == decided
                rest = draft[len(decided) :] if goes_on else []
                count = len(given[name])
                found[name] = (rest + [-1] * count)[:count]
            return found
        if any(-1 in drafts for drafts in given.values()):  # vLLM's placeholders
            ready = self._ready_drafts(list(given))
            return {name: draft[: len(given[name])] for name, draft in zip(given, ready, strict=True)}
        return given

    def _ready_drafts(self, names: list[str]) -> list[list[int]]:
        drafts = [text[at : at + NUM_DRAFTS].copy() for text, at in map(self._place.__getitem__, names)]
        for draft in drafts:
            wrong = self._random.random(len(draft)) > self.right
            draft[wrong] += 1
        return [draft.tolist() for draft in drafts]

    def take_draft_token_ids(self) -> Any:
        if self.put is not None:
            return None
        began_s, cpu_s = time.perf_counter(), time.process_time()
        from vllm.v1.outputs import DraftTokenIds

        ready = DraftTokenIds(list(self._names), self._ready_drafts(self._names))
        self.own_s += time.perf_counter() - began_s
        self.own_cpu_s += time.process_time() - cpu_s
        return ready


def make_texts(num_requests: int, length: int) -> dict[tuple[int, ...], np.ndarray]:
    """Sequences by prompt; a response differs from its group's text where chance wants it."""
    random = np.random.default_rng(1)
    texts = {}
    for group in range(-(-num_requests // GROUP)):
        common = np.resize(random.integers(100, 8000, PERIOD), length)
        for sample in range(min(GROUP, num_requests - group * GROUP)):
            own = np.where(random.random(length) < SHARED, common, random.integers(100, 8000, length))
            own[:PROMPT_TOKENS] = common[:PROMPT_TOKENS]
            own[0] = sample  # tells the responses apart; their group is given
            texts[tuple(own[:PROMPT_TOKENS].tolist())] = own
    return texts


def put_into(max_requests: int, names: list[str]) -> Callable[[Any], None]:
    """Model runner V2's part, on tensors of the CPU, its kernel not launched."""
    import torch

    from paceline.engine.runner import order_of
    from paceline.engine.v2 import ahead
    from paceline.engine.v2.runner import KeyedRunnerV2

    states = SimpleNamespace(
        draft_tokens=torch.zeros(max_requests, NUM_DRAFTS, dtype=torch.int64),
        req_id_to_index={name: row for row, name in enumerate(names)},
    )
    runner = SimpleNamespace(req_states=states, device=torch.device("cpu"))
    ahead._continue = lambda *_: None

    def put(scheduled: Any) -> None:
        if (drafts := order_of(scheduled).ahead) is not None:
            ahead.put_ahead(drafts, 1, states, runner.device)
        else:
            KeyedRunnerV2.put_drafts(runner, scheduled.scheduled_spec_decode_tokens)

    return put


def make_system(
    made: System, num_requests: int, model: Path, threads: int
) -> Callable[[int], dict[str, float]]:
    """An engine whose requests run; a call takes so many steps. threads: that draft from the suffix trees."""
    if made.overlaps:
        sys.path.append(str(ROOT / "tests/engine"))
        import_module("interpreted")  # prepares Triton
    from vllm import SamplingParams

    from paceline.config import BudgetSettings, EngineSettings
    from paceline.engine.rollout_engine import RolloutEngine
    from paceline.types import RolloutRequest

    length = 2048
    sizes: dict[str, Any] = {
        "dtype": "bfloat16", "max_model_len": length, "max_num_seqs": num_requests, "skip_tokenizer_init": True,
        "kv_cache_bytes": 3 << 30, "max_num_batched_tokens": 8192, "async_scheduling": made.overlaps,
    }  # fmt: skip
    settings = None
    if made.policy is None and not made.is_dear:
        sizes["speculative_config"] = {
            "method": "ngram_gpu" if made.overlaps else "ngram",
            "num_speculative_tokens": NUM_DRAFTS,
            "prompt_lookup_max": 3,
        }
    elif made.policy is not None:
        budget = BudgetSettings.model_validate({"policy": made.policy, "fixed_tokens": NUM_DRAFTS})
        settings = EngineSettings(
            max_draft_tokens=NUM_DRAFTS, budget=budget, draft_floor=0.0, suffix_threads=threads
        )
    engine = RolloutEngine(model, settings, **sizes)
    core = engine.vllm_engine.engine_core.engine_core
    texts = make_texts(num_requests, length)
    params = SamplingParams(temperature=1.0, ignore_eos=True)
    for index, prompt in enumerate(texts):
        engine.submit(
            index, RolloutRequest(prompt, length - PROMPT_TOKENS, group=index // GROUP, key=index), params
        )
    names = list(engine.scheduler.requests)
    put = None if made.policy is None else put_into(num_requests, names)
    device = core.model_executor = Device(
        texts, put, DEAR_DRAFT_S if made.is_dear else 0.0, RIGHT[made.overlaps]
    )
    watch = Stopwatch()
    if made.policy is not None:
        drafter = engine.scheduler.loop.free.drafter
        drafter.draft, drafter.append_batch = watch.around(drafter.draft), watch.around(drafter.append_batch)

    def step(count: int) -> dict[str, float]:
        walls, cpus, drafting = [], [], []
        device.num_drafts = device.num_tokens = 0
        for _ in range(count):
            device.own_s = device.own_cpu_s = watch.total_s = 0.0
            began_s, cpu_s = time.perf_counter(), time.process_time()
            _, ran = core.step_fn()
            core.post_step(ran)
            walls.append(time.perf_counter() - began_s - device.own_s)
            cpus.append(time.process_time() - cpu_s - device.own_cpu_s)
            drafting.append(watch.total_s)
        seen = count * num_requests
        return {
            "wall_ms": 1e3 * median(walls),
            "cpu_ms": 1e3 * median(cpus),
            "drafter_ms": 1e3 * median(drafting),
            "drafts_per_request": device.num_drafts / seen,
            "tokens_per_request": device.num_tokens / seen,
        }

    step(WARM_UP)
    return step


def measure(
    systems: tuple[System, ...], num_requests: int, steps: int, turns: int, model: Path, threads: int
) -> list[dict[str, Any]]:
    children = {
        made: Child(f"{made.case} {made.policy}", make_system, made, num_requests, model, threads)
        for made in systems
    }
    found: dict[System, list[dict[str, float]]] = {made: [] for made in systems}
    try:
        for child in children.values():
            child.ready()
        for turn in range(turns):
            for made in systems[:: -1 if turn % 2 else 1]:
                found[made].append(children[made].call(steps // turns))
    finally:
        for child in children.values():
            child.close()
    rows: list[dict[str, Any]] = []
    plain: dict[str, float] = {}
    for made, turns_of in found.items():
        values = {key: median([one[key] for one in turns_of]) for key in turns_of[0]}
        plain = values if made.policy is None else plain
        rows.append(row_of(made, num_requests, values, plain))
    return rows


def row_of(
    made: System, num_requests: int, values: dict[str, float], plain: dict[str, float]
) -> dict[str, Any]:
    """The row of one system. plain: values of plain vLLM in the same case."""
    row: dict[str, Any] = {**made.row(num_requests), **values}
    if made.policy is None or made.overlaps:
        row["drafter_ms"] = None
    if made.policy is not None:
        is_alike = abs(values["tokens_per_request"] / plain["tokens_per_request"] - 1) <= ALIKE
        row |= {
            f"beyond_{clock}_ms": values[f"{clock}_ms"] - plain[f"{clock}_ms"] if is_alike else None
            for clock in ("cpu", "wall")
        }
    return row


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--requests", default="1,64,256", help="batch sizes")
    made.add_argument("--steps", type=int, default=200, help="measured steps of each system")
    made.add_argument("--threads", type=int, default=1, help="threads that draft from the suffix trees")
    made.add_argument("--turns", type=int, default=4, help="turns that the systems take")
    made.add_argument(
        "--model", type=Path, default=ROOT / "assets/prose-policy", help="whose vocabulary it is"
    )
    options = made.parse_args()
    rows = []
    for num_requests in map(int, options.requests.split(",")):
        for systems in (SYSTEMS, OVERLAPPED):
            rows += measure(
                systems, num_requests, options.steps, options.turns, options.model, options.threads
            )
    publish("host_time", rows, COLUMNS, options)


if __name__ == "__main__":
    main()
