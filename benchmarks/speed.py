"""Group rollouts with plain vLLM, vLLM's own speculation, tuned, and Paceline, in turn on one machine.

Cases are groups of responses at temperature 1.0. The target is a small policy inflated to about 189 M parameters
without changing its function (pairs.py), so that a step is bound by memory as on a GPU.
Responses end by themselves. No prompt is one that the drafter learned on; every case and repetition has prompts of its
own, and all drafters forget the responses before it.

**Rivals** are vLLM's own speculators: its draft model with 2 to 16 tokens, greedy and probabilistic, or with a table of
lengths by batch size made for this machine; suffix decoding (Arctic) with a factor of 1 and 4; n-grams. All are
compiled, as vLLM is by default, and corrected: on the CPU backend of 0.32 it divides draft rows by uninitialised memory
(docs/engine.md). First each setting is tried on four other prompts at each case's size (`--reuse-tuning` takes another
run's choice); the two best of a case are then started as a user would start them and measured. `over_best_rival`
compares with the better one of the two.

**Kernels.** On CPUs without a matrix unit Paceline brings kernels of its own for linear layers, on AMD's also for
attention, which vLLM does not have. `--rival-kernels paceline` gives them to plain vLLM and its speculators too: then
only drafting and verifying differ.

**Paceline** runs compiled too, and eager in a second block: paceline_off (its sampler without drafts, the same tokens),
paceline_suffix (suffix trees alone, what `PACELINE=1` gives) and paceline (with the small model).

`ratio` is plain vLLM's time over that of Paceline *for the very same tokens*: plain vLLM is made to generate as many in
each response, and timed. `over_off` is the same over Paceline without drafts. Rivals have other random numbers and so
other responses: for them there is only `normalised`, where plain vLLM's time for responses of the same lengths is
summed up from its step times, fitted to its timed runs; `over_best_rival` divides one `normalised` by the other.
Eager rows are `normalised` to compiled plain vLLM and have an eager plain vLLM of their own for `ratio`.
`nats_per_token` and `mean_length` say whether a rival samples rightly: they are those of paceline_off but for chance.
`tail` columns are from 90 % finished to the end, summed over the repetitions, as some have hardly a tail.

`without_waste` is the ratio of the same steps if drafting took no time and no rejected token were verified.
`clairvoyant` is that of the best possible policy with this drafter: each step verifies exactly the tokens that will be
accepted, drafts are free (bounds.py, of all repetitions, by step times of the case). `clairvoyant_paid` is the
same where those tokens take the drafter as long as in the case's own steps; `clairvoyant_tail` is its `tail_ratio`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from bounds import NOTHING, DraftPrice, fit_clock, play_clairvoyant, wasted_s
from comparison import Bound, Repetitions, add_bound, add_clairvoyant, add_rival, check_bars, summarise
from harness import Child, parser, publish
from pairs import PAIRS, TARGETS, Prompt
from plain_time import PlainTime
from rivals import LENGTHS, MAX_LENGTH, OTHERS, SAMPLINGS, Rival, draft_model
from rollouts import System, Timed, Work, make_system
from tuning import best_settings, next_length, tune_table

from paceline.config import EngineSettings
from paceline.processor import best_linear_kernel

CASES = {"8x16": (8, 16), "2x4": (2, 4), "1x1": (1, 1)}
TUNED = {"8x16": [(4, 32)], "2x4": [(2, 4)] * 2, "1x1": [(1, 1)] * 4}
"""Rollouts (prompts, samples) in which a setting is tried for a case, as many responses as there; they share four
prompts."""
NUM_TUNING_PROMPTS = 4
TUNING_SEED, SEED = 5, 11
COLUMNS = (
    "case",
    "system",
    "mode",
    "wall_s",
    "ratio",
    "ratio_range",
    "over_off",
    "normalised",
    "over_best_rival",
    "without_waste",
    "clairvoyant",
    "clairvoyant_paid",
    "tail_ratio",
    "clairvoyant_tail",
    "normalised_tail",
    "acceptance_length",
    "nats_per_token",
    "mean_length",
    "equal",
)


def tell(*words: Any) -> None:
    """Progress, on the error stream."""
    print(*words, file=sys.stderr, flush=True)


@dataclass
class Bench:
    """One run: the models, the prompts and the options."""

    options: argparse.Namespace
    model: str
    drafter: str
    tuning_prompts: list[Prompt]
    prompts: dict[tuple[str, int], list[list[Prompt]]]
    """By case and repetition, the prompts of each of its rollouts; none twice."""

    def start(self, system: System) -> Child:
        """An engine in a process of its own, warmed up: what it learns of the machine is learned."""
        options = {name: getattr(self.options, name) for name in ("threads", "dtype", "rival_kernels")}
        child = Child(system.name, make_system, system, self.model, self.drafter, options)
        child.ready()
        warm_up = Work(self.tuning_prompts[:2], 4, self.options.max_tokens, TUNING_SEED - 1)
        rival = system.rival if system.is_tuned else None
        child.call(replace(warm_up, rival=rival))
        tell(f"{system.name}{'' if system.compiled else ' eager'}: ready")
        return child

    def tuning_work(self, case: str) -> list[Work]:
        """The rollouts that try a setting at this case's size."""
        made, at = [], 0
        for num_prompts, samples in TUNED[case]:
            prompts = self.tuning_prompts[at : at + num_prompts]
            made.append(Work(prompts, samples, self.options.max_tokens, TUNING_SEED))
            at += num_prompts
        return made


def make_bench(options: argparse.Namespace) -> Bench:
    """Inflate the target and draw the prompts."""
    pair = PAIRS[options.pair]
    model = options.model or pair.make_target(TARGETS / options.pair)
    drawn = pair.draw_prompts(pair.policy, num_prompts(pair.rollouts, options.repetitions), SEED)
    tuning, prompts = split_prompts(drawn, pair.rollouts, options.repetitions)
    return Bench(
        options,
        model,
        options.drafter or pair.make_drafter(TARGETS / f"{options.pair}-drafter"),
        tuning,
        prompts,
    )


def num_prompts(rollouts: Mapping[str, int], repetitions: int) -> int:
    """Prompts that a run needs; rollouts: of a repetition, by case."""
    return NUM_TUNING_PROMPTS + repetitions * sum(rollouts[case] * CASES[case][0] for case in CASES)


def split_prompts(
    drawn: Sequence[Prompt], rollouts: Mapping[str, int], repetitions: int
) -> tuple[list[Prompt], dict[tuple[str, int], list[list[Prompt]]]]:
    """Prompts to tune with, and those of each case and repetition; whatever cases are run, a case has the same."""
    rest = iter(drawn)
    tuning = [next(rest) for _ in range(NUM_TUNING_PROMPTS)]
    prompts = {
        (case, r): [[next(rest) for _ in range(CASES[case][0])] for _ in range(rollouts[case])]
        for r in range(repetitions)
        for case in CASES
    }
    return tuning, prompts


# --- tuning


@dataclass
class Tuning:
    """Which settings were tried, and how they did: ratios to compiled plain vLLM for the same lengths."""

    rivals: dict[str, Rival] = field(default_factory=dict)
    scores: dict[str, dict[str, float]] = field(default_factory=dict)
    """[case][setting]."""
    kernels: str = "vllm"
    """`--rival-kernels` of the trials."""

    def best(self, case: str) -> list[Rival]:
        """The two settings to measure."""
        return [self.rivals[name] for name in best_settings(self.scores.get(case, {}))]

    def write(self) -> dict[str, Any]:
        """As JSON."""
        rivals = {name: vars(rival) for name, rival in self.rivals.items()}
        return {"rivals": rivals, "scores": self.scores, "kernels": self.kernels}

    @classmethod
    def read(cls, file: Path) -> Tuning:
        """From a result file, or a file of `write` alone."""
        found = json.loads(file.read_text())
        found = found.get("tuning", found)
        rivals = {
            name: Rival(**one | {"table": one["table"] and tuple(map(tuple, one["table"]))})
            for name, one in found["rivals"].items()
        }
        return cls(rivals, found["scores"], found.get("kernels", "vllm"))


def check_kernels(options: argparse.Namespace) -> None:
    """End with a message where the linear layers wanted are not there, or trials to be reused were made with others."""
    if options.rival_kernels == "paceline" and best_linear_kernel() == "vllm":
        sys.exit(
            "--rival-kernels paceline: on this processor Paceline itself uses vLLM's; leave the option out"
        )
    file = options.reuse_tuning or options.complete_tuning
    if file is not None and (tuning := Tuning.read(file)).kernels != options.rival_kernels:
        sys.exit(
            f"{file} holds trials with --rival-kernels {tuning.kernels}, this run has {options.rival_kernels}: leave "
            "the file out, or give the same"
        )


def tune(bench: Bench, plain: Child, tuning: Tuning) -> None:
    """Try every setting at every case's size, one engine after another; those that `tuning` has are not tried again.

    A table of lengths is made if all lengths were tried here, as it takes the times of their steps.
    """
    cases = bench.options.cases
    plains = {}
    for case in cases:
        plains[case] = PlainTime([plain.call(work) for work in bench.tuning_work(case)])

    running: list[Child] = []

    def attempt(system: System, case: str, rival: Rival) -> list[Timed]:
        if rival.name in tuning.scores.get(case, {}):
            return []
        if not running:
            running.append(bench.start(system))
        runs = [running[0].call(replace(work, rival=rival)) for work in bench.tuning_work(case)]
        score = sum(plains[case].seconds(run)[0] for run in runs) / sum(run.wall_s for run in runs)
        tuning.rivals[rival.name] = rival
        tuning.scores.setdefault(case, {})[rival.name] = score
        tell(f"tuning {case} {rival.name}: {score:.2f}")
        return runs

    for sampling in SAMPLINGS:
        is_new = not any(
            draft_model(LENGTHS[0], sampling).name in tuning.scores.get(case, {}) for case in cases
        )
        system = System("draft_model", True, draft_model(MAX_LENGTH, sampling), is_tuned=True)
        steps: dict[int, list[Any]] = {}
        for case in cases:
            scores: dict[int, float] = {}
            while (length := next_length(scores)) is not None:
                rival = draft_model(length, sampling)
                for run in attempt(system, case, rival):
                    steps.setdefault(length, []).extend(run.steps)
                scores[length] = tuning.scores[case][rival.name]
        if is_new and (table := tune_table(steps)) is not None:
            for case in cases:
                attempt(system, case, replace(draft_model(MAX_LENGTH, sampling), table=table))
        end_all(running)
    for family in dict.fromkeys(rival.family for rival in OTHERS):
        settings = [rival for rival in OTHERS if rival.family == family]
        system = System(family, True, settings[0], is_tuned=True)
        for case in cases:
            for rival in settings:
                attempt(system, case, rival)
        end_all(running)


def end_all(running: list[Child]) -> None:
    """Close what is running."""
    while running:
        running.pop().close()


# --- measuring


@dataclass
class Found:
    """The rollouts of one case and mode, by system; `plain` is plain vLLM on Paceline's lengths."""

    runs: dict[str, Repetitions] = field(default_factory=dict)

    def take(self, system: str, runs: list[Timed]) -> None:
        """Add a repetition."""
        self.runs.setdefault(system, []).append(runs)


def measure_case(bench: Bench, case: str, children: dict[str, Child], repetitions: int) -> Found:
    """All systems in turn, in another order in each repetition; plain vLLM follows the first that says how long
    Paceline's responses are. children: by system; `paceline` serves paceline_off too."""
    found, samples = Found(), CASES[case][1]
    systems = [name for name in children if name != "plain"] + ["paceline_off"]
    for r in range(repetitions):
        turn = r * len(systems) // repetitions
        lengths: list[list[int]] | None = None
        works = [
            Work(prompts, samples, bench.options.max_tokens, 77 + r) for prompts in bench.prompts[case, r]
        ]
        for name in systems[turn:] + systems[:turn]:
            child = children["paceline" if name == "paceline_off" else name]
            runs = [child.call(replace(work, drafting=name != "paceline_off")) for work in works]
            found.take(name, runs)
            report(case, r, name, runs)
            if lengths is None and name.startswith("paceline"):
                lengths = [run.lengths for run in runs]
                forced = [replace(work, lengths=some) for work, some in zip(works, lengths, strict=True)]
                found.take("plain", [children["plain"].call(work) for work in forced])
                report(case, r, "plain", found.runs["plain"][-1])
    return found


def report(case: str, repetition: int, name: str, runs: Sequence[Timed]) -> None:
    """A line of progress."""
    rate = sum(run.num_tokens for run in runs) / sum(run.wall_s for run in runs)
    tell(f"{case} {repetition} {name}: {rate:.0f} tokens/s")


def compare(
    case: str, found: Found, reference: PlainTime, rivals: Sequence[str], drafter: str
) -> list[dict[str, Any]]:
    """One row per system. reference: compiled plain vLLM's times in this case."""
    forced, off = found.runs["plain"], found.runs["paceline_off"]
    clock = fit_clock(
        [run for name in ("paceline", "paceline_off") for one in found.runs[name] for run in one]
    )
    rows = []
    for name, runs in found.runs.items():
        is_own = name.startswith("paceline") or name == "plain"
        row = summarise(name, runs, reference, forced if is_own else None, off if is_own else None)
        if (
            name == "plain"
        ):  # its lengths are Paceline's, and what it says behind a response's end means nothing
            del row["nats_per_token"], row["mean_length"]
        if name in ("paceline", "paceline_suffix"):
            wasted = [wasted_s(run, clock) for one in runs for run in one]
            walls = [(run.wall_s, run.tail_s) for one in runs for run in one]
            spared = [sum(w[i] - one[i] for w, one in zip(walls, wasted, strict=True)) for i in (0, 1)]
            add_bound(row, Bound(*spared), forced)
        if name == "paceline":
            depth = EngineSettings().max_draft_tokens
            price = DraftPrice.fit([run for one in runs for run in one])
            best = [play_clairvoyant(run, clock, price, drafter, depth) for run in chain(*off)]
            add_clairvoyant(row, sum(best, NOTHING), list(chain(*forced)), list(chain(*runs)))
        rows.append({"case": case, **row})
    add_rival(rows, rivals)
    return rows


def measure(bench: Bench, save: Callable[[dict[str, Any]], None]) -> None:
    """Both blocks, case by case; `save` is called with all that is known after tuning and after each case."""
    options = bench.options
    result: dict[str, Any] = {"rows": [], "bars": []}
    references: dict[str, PlainTime] = {}
    for mode in options.modes:
        compiled = mode == "compiled"
        own = {name: bench.start(System(name, compiled)) for name in ("plain", "paceline", "paceline_suffix")}
        tuning = Tuning(kernels=options.rival_kernels)
        if compiled:
            if options.reuse_tuning or options.complete_tuning:
                tuning = Tuning.read(options.reuse_tuning or options.complete_tuning)
            if not options.reuse_tuning:
                tune(bench, own["plain"], tuning)
            result["tuning"] = tuning.write()
            save(result)
        running: dict[str, Child] = {}
        for case in options.cases:
            running = change_rivals(bench, running, tuning.best(case))
            repetitions = options.repetitions if compiled else options.eager_repetitions
            found = measure_case(bench, case, own | running, repetitions)
            if compiled or case not in references:
                references[case] = PlainTime([run for one in found.runs["plain"] for run in one])
            rows = compare(case, found, references[case], list(running), bench.drafter)
            result["rows"] += [{**row, "mode": mode} for row in rows]
            if compiled:
                result["bars"] += check_bars(options.pair, case, rows)
            save(result)
        for child in (*own.values(), *running.values()):
            child.close()


def change_rivals(bench: Bench, running: dict[str, Child], wanted: Sequence[Rival]) -> dict[str, Child]:
    """End the rivals that are not wanted, before those that are wanted start: at most five engines live at a time."""
    names = {rival.name: rival for rival in wanted}
    for name in [name for name in running if name not in names]:
        running.pop(name).close()
    return {
        name: running.get(name) or bench.start(System(name, True, rival)) for name, rival in names.items()
    }


def parse_options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    made = parser(__doc__)
    made.add_argument("--pair", default="countdown", choices=list(PAIRS), help="target, drafter and prompts")
    made.add_argument("--model", metavar="DIR", help="another target; default: the pair's policy, inflated")
    made.add_argument("--drafter", metavar="DIR", help="another drafter; default: the pair's")
    made.add_argument("--dtype", default="bfloat16")
    made.add_argument("--threads", type=int, default=2, help="OMP threads of each engine")
    made.add_argument(
        "--rival-kernels",
        default="vllm",
        choices=["vllm", "paceline"],
        help="whose linear layers and attention plain vLLM and its speculators use",
    )
    made.add_argument("--repetitions", type=int, default=3)
    made.add_argument("--eager-repetitions", type=int, default=1)
    made.add_argument("--max-tokens", type=int, default=1024)
    made.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    made.add_argument("--modes", nargs="+", default=["compiled", "eager"], choices=["compiled", "eager"])
    taken = made.add_mutually_exclusive_group()
    taken.add_argument(
        "--reuse-tuning", type=Path, metavar="FILE", help="a result file whose tuning is taken"
    )
    taken.add_argument(
        "--complete-tuning", type=Path, metavar="FILE", help="the same, and what it lacks is tried"
    )
    options = made.parse_args(words)
    if options.eager_repetitions > options.repetitions:
        made.error(
            f"--eager-repetitions {options.eager_repetitions}: at most --repetitions {options.repetitions}"
        )
    return options


def main() -> None:
    options = parse_options()

    def save(result: dict[str, Any]) -> None:
        publish("speed", result["rows"], COLUMNS, options, tuning=result.get("tuning"), bars=result["bars"])
        for bar in result["bars"]:
            verdict = "met" if bar["met"] else "MISSED"
            print(
                f"{bar['case']} {bar['bar']}: {bar['reached']:.2f} of {bar['needed']:.2f} needed: {verdict}"
            )

    check_kernels(options)
    measure(make_bench(options), save)


if __name__ == "__main__":
    main()
