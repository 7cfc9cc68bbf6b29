"""Exactness: responses compared with plain decoding, token for token and, behind every token, logit for logit.

The reference is the same engine without drafts, all responses in one batch. Each case generates the same requests
(prompts, keys) in another way: suffix and model drafts, garbage drafts of ragged length, small batches, chunks that
are submitted again, suffix drafts alone. `logits_different` counts accepted tokens whose raw logits differ in any bit.
Diverged tokens are counted per response from its first difference on. A row counts (`counts`) if it has
`--least-tokens` tokens and verified the drafts that it is about: some must be accepted, of garbage less than a fifth.
All engines are compiled, as recipes have it, with Paceline's kernels where they suit the processor (`--eager`: not
compiled).

The next cases are the control (`invariant` false): the same with batch invariance off and vLLM's own kernels, in a
process of its own in which nothing has been made invariant. Its target is the inflated policy, and it has fewer
responses: sums over a narrow model come out alike in any order.

The last cases are drafters that run ahead, and help between workers. They are compared with plain decoding in another
process, rollout by rollout, until there are `--least-tokens` tokens and enough of what the case is about (`counts`), or
`--minutes` are over:

    decoupled        a draft worker beside suffix trees; a tenth of the accepted tokens must be its own
    enumeration      a draft worker alone; a tenth of the accepted tokens must have been drafted behind a likely
                     correction, before that came
    inside or ahead  an engine on two threads that changes live between a drafter inside and a draft worker, beside
                     suffix trees; it must change 10 times, and a tenth of the accepted tokens must be the drafter's
    races            two workers, the free one copies a straggler; 100 times one of the two must take the lead
    role changes     two workers, the free one drafts for the other; 50 times one must begin or end to do so, and a
                     token of its drafts must be accepted

`share`: of the accepted tokens, those of the mechanism (races: what the other worker had before; role changes: those of
the drafter in steps before which the other worker was heard). `changes`: of the lead, of roles, or of where the drafter
is.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness import Child, parser, print_bars, publish, save

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests/engine"))
COLUMNS = (
    "case", "dtype", "invariant", "tokens", "diverged_tokens", "per_million", "logits_different", "draft_tokens",
    "accepted_drafts", "share", "changes", "counts",
)  # fmt: skip
CHUNK_TOKENS = 48
SPLIT_KV = "VLLM_CPU_ATTN_SPLIT_KV"
"""What an invariant engine sets in the environment (engine/invariance.py)."""
RUNNING = {"decoupled": 8, "enumeration": 2, "inside or ahead": 2, "races": 4, "role changes": 2}
"""Responses that run at once; of a fleet, in the tail."""
MOST_GARBAGE = 0.2
"""Of the draft tokens; a larger part of them accepted is no garbage."""
LEAST_SHARE = 0.1
LEAST_CHANGES = {"inside or ahead": 10, "races": 100, "role changes": 50}
OWN_SHARE = ("decoupled", "enumeration", "inside or ahead")
"""A tenth of the accepted tokens must be the mechanism's."""
TO_THE_LIMIT = ("races", "role changes")
"""Responses that go on to their limits."""


def make_requests(model: str, num_prompts: int, samples: int, max_tokens: int, seed: int = 31) -> list[Any]:
    """Countdown prompts, `samples` responses each, with fixed keys."""
    from pairs import make_prompts

    from paceline.dice import derive_key
    from paceline.types import RolloutRequest

    return [
        RolloutRequest(prompt, max_tokens, key=derive_key(1, prompt, sample), sample=sample)
        for prompt in make_prompts(model, num_prompts, seed)
        for sample in range(samples)
    ]


class Bench:
    """One engine and the ways to generate on it."""

    def __init__(self, options: argparse.Namespace, dtype: str, invariant: bool) -> None:
        from paceline.config import BudgetSettings, EngineSettings
        from paceline.engine.rollout_engine import RolloutEngine
        from paceline.processor import best_linear_kernel

        self.options = options
        self.settings = EngineSettings(
            model_drafter=options.drafter,
            max_draft_tokens=8,
            batch_invariant=invariant,
            linear_kernel=best_linear_kernel() if invariant else "vllm",
            compiled=not options.eager,
            budget=BudgetSettings(policy="fixed", fixed_tokens=8),
        )
        self.engine = RolloutEngine(
            options.model, self.settings, dtype=dtype, max_num_seqs=128, kv_cache_bytes=2 << 30
        )
        self.loop = self.engine.scheduler.loop
        self.suffix = self.loop.free.drafter
        self.drafts = Counter[str]()
        """Of all responses and chunks so far."""

    def generate(self, requests: list[Any]) -> list[Any]:
        from vllm import SamplingParams

        self.engine.reset_prefix_cache()
        responses = self.engine.generate(requests, SamplingParams(temperature=1.0))
        self.drafts["draft_tokens"] += sum(response.num_draft_tokens for response in responses)
        self.drafts["accepted_drafts"] += sum(response.num_accepted_tokens for response in responses)
        return responses

    def plain(self, requests: list[Any]) -> list[Any]:
        self.loop.set_drafting(False)
        responses = self.generate(requests)
        self.loop.set_drafting(True)
        return responses

    def drafted(self, requests: list[Any]) -> list[Any]:
        return self.generate(requests)

    def suffix_drafted(self, requests: list[Any]) -> list[Any]:
        """The last case: the model drafter does not come back."""
        self.engine.drop_drafter()
        return self.generate(requests)

    def garbage(self, requests: list[Any]) -> list[Any]:
        """Without the model drafter: its drafts are better, and would be verified instead."""
        from drafters import ScriptedDrafter

        self.engine.drop_drafter()
        self.loop.free.drafter = ScriptedDrafter({}, 0.0, self.engine.vocab_size)
        responses = self.generate(requests)
        self.loop.free.drafter = self.suffix
        self.engine.use_drafter(0)
        return responses

    def small_batches(self, requests: list[Any]) -> list[Any]:
        size = self.options.small_batch
        return [r for at in range(0, len(requests), size) for r in self.generate(requests[at : at + size])]

    def chunked(self, requests: list[Any]) -> list[Any]:
        """Cut every response after each CHUNK_TOKENS tokens, drop its cache and submit it again."""
        done: dict[int, Any] = {}
        waiting = dict(enumerate(requests))
        while waiting:
            part = {
                index: replace(
                    request, max_tokens=min(len(request.generated) + CHUNK_TOKENS, requests[index].max_tokens)
                )
                for index, request in waiting.items()
            }
            for index, response in zip(part, self.generate(list(part.values())), strict=True):
                if response.finish_reason == "stop" or len(response.tokens) >= requests[index].max_tokens:
                    done[index] = response
                    del waiting[index]
                else:
                    waiting[index] = replace(requests[index], generated=response.tokens)
        return [done[index] for index in range(len(requests))]


PLAIN, GARBAGE = "again without drafts", "garbage drafts"
CASES: dict[str, Callable[[Bench, list[Any]], list[Any]]] = {
    PLAIN: Bench.plain,
    "suffix and model drafts": Bench.drafted,
    GARBAGE: Bench.garbage,
    "batches of a few, with drafts": Bench.small_batches,
    "chunks submitted again": Bench.chunked,
    "suffix drafts alone": Bench.suffix_drafted,
}
WITHOUT_INVARIANCE = {
    f"{name}, invariance off": CASES[name]
    for name in ("suffix and model drafts", "batches of a few, with drafts", "chunks submitted again")
}


def diverged(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Tokens from the first difference on."""
    same = next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
    return max(len(one), len(other)) - same


def measure(
    options: argparse.Namespace, dtype: str, names: list[str], invariant: bool
) -> list[dict[str, Any]]:
    """The rows of cases that share an engine."""
    from recorded_logits import recorded

    requests = make_requests(options.model, options.prompts, options.samples, options.max_tokens)
    bench = Bench(options, dtype, invariant)
    with recorded(bench.engine) as wanted:
        reference = bench.plain(requests)
    tokens = sum(len(response.tokens) for response in reference)
    print(f"{dtype}: {tokens} tokens to compare", file=sys.stderr, flush=True)
    if len(wanted) != tokens:
        raise SystemExit(f"{dtype}: logits of {len(wanted)} tokens were recorded, of {tokens}")
    rows = []
    for case in names:
        bench.drafts.clear()
        with recorded(bench.engine) as found:
            responses = (CASES | WITHOUT_INVARIANCE)[case](bench, requests)
        lost = sum(diverged(a.tokens, b.tokens) for a, b in zip(reference, responses, strict=True))
        tally = Counter(tokens=tokens, **bench.drafts)
        rows.append(
            {
                "case": case,
                "dtype": dtype,
                "invariant": invariant,
                "tokens": tokens,
                "diverged_tokens": lost,
                "per_million": 1e6 * lost / tokens,
                "logits_different": sum(found.get(name) != digest for name, digest in wanted.items()),
                **bench.drafts,
                **({"counts": is_enough(case, tally, options.least_tokens)} if invariant else {}),
            }
        )
        print(rows[-1], file=sys.stderr, flush=True)
    bench.engine.close()
    return rows


def make_control(options: argparse.Namespace, dtype: str) -> Callable[[list[str]], list[dict[str, Any]]]:
    """The control, for a process of its own; returns what measures its cases."""
    os.environ.pop(SPLIT_KV, None)  # an invariant engine of the parent has set it
    own = control_options(options)

    def measure_control(names: list[str]) -> list[dict[str, Any]]:
        return measure(own, dtype, names, invariant=False)

    return measure_control


def control_options(options: argparse.Namespace) -> argparse.Namespace:
    """The control's: another target, fewer responses."""
    from pairs import PAIRS, TARGETS

    smaller = {"prompts": options.control_prompts, "samples": options.control_samples}
    model = PAIRS["countdown"].make_target(TARGETS / "countdown")
    return argparse.Namespace(**{**vars(options), **smaller, "model": model})


def compare_batches(options: argparse.Namespace, dtype: str) -> Iterator[list[dict[str, Any]]]:
    """The rows of the cases that one engine can show, and those of their control."""
    names = [case for case in CASES if case in options.rows]
    if names:
        yield measure(options, dtype, names, invariant=True)
    names = [case for case in WITHOUT_INVARIANCE if case in options.rows]
    if names:
        control = Child("control", make_control, options, dtype)
        control.ready()
        yield control.call(names)
        control.close()


@dataclass(frozen=True)
class Found:
    """A rollout."""

    requests: list[Any]
    ids: list[tuple[int, ...]]
    accepted: int
    """Draft tokens."""
    supplied: int
    """Of these, the mechanism's."""
    changes: int = 0


def make_plain(model: str, dtype: str, compiled: bool) -> Callable[[list[Any], bool], list[tuple[int, ...]]]:
    """Plain decoding, for a process of its own; returns what generates: requests, and whether to their limits."""
    from vllm import SamplingParams

    from paceline.config import EngineSettings
    from paceline.engine.rollout_engine import RolloutEngine

    settings = EngineSettings(drafter="none", batch_invariant=True, compiled=compiled)
    engine = RolloutEngine(model, settings, dtype=dtype)

    def generate(requests: list[Any], ignore_eos: bool) -> list[tuple[int, ...]]:
        params = SamplingParams(temperature=1.0, ignore_eos=ignore_eos)
        return [response.tokens for response in engine.generate(requests, params)]

    return generate


@contextmanager
def draft_worker(case: str, dtype: str, options: argparse.Namespace) -> Iterator[Callable[[int], Found]]:
    """An engine with a draft worker; yields what rolls out, by seed."""
    import torch
    from vllm import SamplingParams

    from paceline.config import EngineSettings
    from paceline.engine.rollout_engine import RolloutEngine

    settings = EngineSettings(
        drafter="none" if case == "enumeration" else "suffix",
        model_drafter=options.drafter,
        draft_worker="auto" if case == "inside or ahead" else True,
        reconfigure_steps=64,
        batch_invariant=True,
        compiled=not options.eager,
    )
    with RolloutEngine(options.model, settings, dtype=dtype) as engine:
        ahead, coupling = engine.scheduler.loop.ahead, engine.scheduler.loop.coupling
        if coupling is not None:
            torch._C.set_num_threads(2)  # one less while the worker drafts

        def roll_out(seed: int) -> Found:
            requests = make_requests(options.model, RUNNING[case], 1, options.max_tokens, seed)
            engine.reset_prefix_cache()
            engine.take_observations()
            before = ahead.counts[0].num_branch_tokens
            changes_before = coupling.num_changes if coupling else 0
            responses = engine.generate(requests, SamplingParams(temperature=1.0))
            steps = engine.take_observations()
            accepted = sum(step.num_accepted_tokens for step in steps)
            supplied = sum(step.num_model_tokens for step in steps)
            if case == "enumeration":
                supplied = ahead.counts[0].num_branch_tokens - before
            changes = coupling.num_changes - changes_before if coupling else 0
            return Found(requests, [response.tokens for response in responses], accepted, supplied, changes)

        yield roll_out


@contextmanager
def helping_fleet(case: str, dtype: str, options: argparse.Namespace) -> Iterator[Callable[[int], Found]]:
    """A fleet whose free worker copies, or drafts; yields what rolls out, by seed."""
    import stragglers

    from paceline.planning.help import Help

    kind = Help.COPY if case == "races" else Help.DRAFT
    with (
        stragglers.forced(kind),
        stragglers.start_fleet(
            options.model, options.drafter, dtype, options.max_tokens, compiled=not options.eager
        ) as fleet,
    ):

        def roll_out(seed: int) -> Found:
            requests = stragglers.straggling_requests(fleet, RUNNING[case], options.max_tokens, seed)
            fleet.reset_prefix_cache()
            fleet.take_observations()
            fleet.helps.take()
            ids = [response.tokens for response in stragglers.roll_out(fleet, requests)]
            steps, helps = fleet.take_observations(), fleet.helps.take()
            accepted = sum(step.num_accepted_tokens for step in steps)
            if kind is Help.COPY:
                supplied = sum(step.num_adopted_tokens for step in steps)
                return Found(requests, ids, accepted, supplied, sum(one.num_leads for one in helps))
            changes = 2 * len(helps)  # it begins and it ends
            return Found(requests, ids, accepted, count_helped(steps), changes)

        yield roll_out


def count_helped(steps: list[Any]) -> int:
    """Accepted tokens of the drafter in steps before which a helper was heard: in others the engine drafts inside.

    Not exactly a helper's: where both have drafted they cannot be told apart, as help begins; and a step that verifies
    only what was heard before an earlier one is left out.
    """
    return sum(step.num_model_tokens for step in steps if any(step.ahead_tokens))


MECHANISMS = {
    "decoupled": draft_worker,
    "enumeration": draft_worker,
    "inside or ahead": draft_worker,
    "races": helping_fleet,
    "role changes": helping_fleet,
}


def compare(case: str, dtype: str, options: argparse.Namespace) -> dict[str, Any]:
    """Rollouts of one mechanism, each compared with plain decoding in another process, until there are enough."""
    tally = Counter[str]()
    plain = Child("plain", make_plain, options.model, dtype, not options.eager)
    with MECHANISMS[case](case, dtype, options) as roll_out:
        plain.ready()
        begin_s = time.monotonic()
        for seed in itertools.count(1):
            found = roll_out(seed)
            wanted = plain.call(found.requests, case in TO_THE_LIMIT)
            tally["tokens"] += sum(map(len, wanted))
            tally["diverged_tokens"] += sum(diverged(*pair) for pair in zip(wanted, found.ids, strict=True))
            tally["accepted_drafts"] += found.accepted
            tally["supplied"] += found.supplied
            tally["changes"] += found.changes
            if not seed % 10:
                print(f"{case}, {dtype}: {dict(tally)}", file=sys.stderr, flush=True)
            if is_enough(case, tally, options.least_tokens) or is_over(begin_s, options.minutes):
                break
    plain.close()
    tokens, accepted = tally["tokens"], tally["accepted_drafts"]
    return {
        "case": case,
        "dtype": dtype,
        **{key: tally[key] for key in ("tokens", "diverged_tokens", "accepted_drafts", "changes")},
        "per_million": 1e6 * tally["diverged_tokens"] / tokens,
        "share": tally["supplied"] / accepted if accepted else 0.0,
        "counts": is_enough(case, tally, options.least_tokens),
        "wall_s": time.monotonic() - begin_s,
    }


def is_enough(case: str, tally: Counter[str], least_tokens: int) -> bool:
    """Whether a row counts: enough tokens, and enough of what the case is about."""
    if case in CASES:
        return tally["tokens"] >= least_tokens and is_verified(case, tally)
    least = max(LEAST_SHARE * tally["accepted_drafts"] if case in OWN_SHARE else 0, 1)
    has_share = case == "races" or tally["supplied"] >= least  # whoever takes the lead had something before
    has_changes = tally["changes"] >= LEAST_CHANGES.get(case, 0)
    return tally["tokens"] >= least_tokens and has_share and has_changes


def is_verified(case: str, tally: Counter[str]) -> bool:
    """Whether the drafts that a case of one engine is about were verified."""
    drafted, accepted = tally["draft_tokens"], tally["accepted_drafts"]
    if case == PLAIN:
        return not drafted
    return accepted < MOST_GARBAGE * drafted if case == GARBAGE else accepted > 0


def check_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The bars: no token of a row has diverged, the row counts, and its mechanism was at work. Controls have none."""
    bars = []
    for row in rows:
        if not row.get("invariant", True):
            continue
        name, lost = f"{row['case']}, {row['dtype']}", row["diverged_tokens"]
        met = not lost and row["counts"]
        bars.append({"case": f"{name}: diverged tokens", "needed": 0, "reached": lost, "met": met})
        for what, needed in (("share", dict.fromkeys(OWN_SHARE, LEAST_SHARE)), ("changes", LEAST_CHANGES)):
            if (least := needed.get(row["case"])) is not None:
                bar = {"case": f"{name}: {what}", "needed": least, "reached": row[what]}
                bars.append({**bar, "met": row[what] >= least})
    return bars


def is_over(begin_s: float, minutes: float) -> bool:
    """Whether the time of a row is over."""
    return time.monotonic() - begin_s >= 60.0 * minutes


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--model", metavar="DIR", default=str(ROOT / "assets/countdown-policy"))
    made.add_argument("--drafter", metavar="DIR", default=str(ROOT / "assets/countdown-drafter"))
    made.add_argument("--prompts", type=int, default=32)
    made.add_argument("--samples", type=int, default=12)
    made.add_argument("--max-tokens", type=int, default=768)
    made.add_argument("--control-prompts", type=int, default=4)
    made.add_argument("--control-samples", type=int, default=8)
    made.add_argument("--eager", action="store_true", help="no compiled steps")
    made.add_argument("--small-batch", type=int, default=7)
    made.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    every = [*CASES, *WITHOUT_INVARIANCE, *MECHANISMS]
    made.add_argument("--rows", nargs="+", default=every, choices=every, metavar="CASE", help="default: all")
    made.add_argument(
        "--least-tokens", type=int, default=50_000, help="of a row that counts, in each number format"
    )
    made.add_argument(
        "--minutes", type=float, default=4.0, help="longest time for one of the mechanisms, starts apart"
    )
    options = made.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows: list[dict[str, Any]] = []
    for dtype in options.dtypes:
        for found in compare_batches(options, dtype):
            rows += found
            save("exactness", rows, options, bars=check_rows(rows))
        for case in MECHANISMS:
            if case in options.rows:
                rows.append(compare(case, dtype, options))
                print(rows[-1], file=sys.stderr, flush=True)
                save("exactness", rows, options, bars=check_rows(rows))
    bars = check_rows(rows)
    publish("exactness", rows, COLUMNS, options, bars=bars)
    print_bars(bars)


if __name__ == "__main__":
    main()
