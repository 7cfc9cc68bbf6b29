"""Replay of recorded responses: accepted tokens per step and time per token, drafter by drafter.

All responses of a group advance in lockstep, as one engine batch: each step every response gets up to K draft tokens,
its recorded continuation decides how many are accepted, accepted tokens and the bonus token are appended. Recorded
text has no dice, so every drafter is greedy here. `us_per_token` is the time of drafting, of appending and, for ours,
of learning the calibration, over the tokens of the responses; `length_ratio` and `time_ratio` compare with Arctic's
setting of the longer acceptance length in the same case (Arctic over the row: above 1 is faster).

A case is `FILE:GROUPS` or `FILE:GROUPS:RESPONSES`: so many groups of a file, so many responses of each.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from harness import parser, publish

from paceline.drafting import lookup, suffix
from paceline.planning import acceptance
from paceline.types import DraftBatch, DraftQuery

RECORDED = Path("../shared/data/groups")
DEFAULT_GROUPS = RECORDED / "grpo_gsm8k_tools_64x16.jsonl.gz"
DEFAULT_CASES = (
    f"{DEFAULT_GROUPS}:8",
    f"{DEFAULT_GROUPS}:64",
    f"{RECORDED}/thinking_deepseek_r1_glm.jsonl.gz:24",
    f"{RECORDED}/aiw_qwen_distill_14b.jsonl.gz:6:16",
)
ALL_RESPONSES = 1000
GRID = np.array([np.inf], dtype=np.float32)
COLUMNS = (
    "case",
    "system",
    "acceptance_length",
    "drafted_per_step",
    "us_per_token",
    "acceptance_rate",
    "length_ratio",
    "time_ratio",
)


@dataclass
class Tally:
    """Sums over a replay."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def row(self, system: str) -> dict[str, Any]:
        return {
            "system": system,
            "acceptance_length": 1 + self.accepted / max(self.steps, 1),
            "drafted_per_step": self.drafted / max(self.steps, 1),
            "us_per_token": 1e6 * self.seconds / max(self.tokens, 1),
            "acceptance_rate": self.accepted / max(self.drafted, 1),
            "steps": self.steps,
            "tokens": self.tokens,
        }


class System(Protocol):
    """A drafter under test; each call returns the seconds it spent in the drafter itself."""

    name: str

    def begin(self, group: int, prompt: np.ndarray, responses: list[np.ndarray]) -> None: ...
    def draft(self, running: list[int], done: list[int], limit: int) -> tuple[list[list[int]], float]: ...
    def append(self, running: list[int], new: list[np.ndarray], accepted: list[int]) -> float: ...
    def end(self) -> None: ...


class Arctic:
    """Arctic Inference's suffix decoding as vLLM drives it: one cache, responses of all groups in it."""

    def __init__(self, name: str, factor: float, floor: float, depth: int = 64) -> None:
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        self.name, self._factor, self._floor, self._depth = name, factor, floor, depth
        self._cache = SuffixDecodingCache(max_tree_depth=depth)

    def begin(self, group: int, prompt: np.ndarray, responses: list[np.ndarray]) -> None:
        self._ids = [(group, r) for r in range(len(responses))]
        self._texts = [np.concatenate([prompt, response]) for response in responses]
        self._prompt_tokens = len(prompt)
        for request in self._ids:
            self._cache.start_request(request, prompt)

    def draft(self, running: list[int], done: list[int], limit: int) -> tuple[list[list[int]], float]:
        drafts, seconds = [], 0.0
        for r, position in zip(running, done, strict=True):
            end = self._prompt_tokens + position
            context = self._texts[r][max(0, end - self._depth) : end]
            start = time.perf_counter()
            draft = self._cache.speculate(
                self._ids[r],
                context,
                max_spec_tokens=limit,
                max_spec_factor=self._factor,
                min_token_prob=self._floor,
            )
            seconds += time.perf_counter() - start
            drafts.append(draft.token_ids)
        return drafts, seconds

    def append(self, running: list[int], new: list[np.ndarray], accepted: list[int]) -> float:
        start = time.perf_counter()
        for r, tokens in zip(running, new, strict=True):
            self._cache.add_active_response(self._ids[r], tokens)
        return time.perf_counter() - start

    def end(self) -> None:
        for request in self._ids:
            self._cache.stop_request(request)


class Ours:
    """A Paceline drafter with acceptance calibrated online, as in the engine's fast loop."""

    def __init__(
        self, name: str, drafter: suffix.SuffixForest | lookup.LookupDrafter, prior: np.ndarray, floor: float
    ) -> None:
        self.name, self._drafter, self._floor = name, drafter, floor
        self.table = acceptance.AcceptanceTable.initial(prior)
        self._group = 0
        self._batch: DraftBatch | None = None

    def begin(self, group: int, prompt: np.ndarray, responses: list[np.ndarray]) -> None:
        self._group, self._prompt_tokens = group, len(prompt)
        self._drafter.open_group(group, prompt)

    def draft(self, running: list[int], done: list[int], limit: int) -> tuple[list[list[int]], float]:
        n = len(running)
        query = DraftQuery(
            groups=np.full(n, self._group, np.int64),
            responses=np.asarray(running, np.int64),
            keys=np.zeros(n, np.uint64),
            positions=np.asarray(done, np.int64) + self._prompt_tokens,
            temperatures=np.zeros(n, np.float32),
            max_tokens=np.full(n, limit, np.int32),
        )
        start = time.perf_counter()
        calibration = acceptance.estimate(self.table)
        batch = self._drafter.draft(
            query, sharpness=np.inf, sharpness_grid=GRID, calibration=calibration, floor=self._floor
        )
        seconds = time.perf_counter() - start
        self._batch = batch
        return [batch.tokens[r, : batch.num_tokens[r]].tolist() for r in range(n)], seconds

    def append(self, running: list[int], new: list[np.ndarray], accepted: list[int]) -> float:
        offsets = np.zeros(len(new) + 1, np.int32)
        np.cumsum([len(tokens) for tokens in new], out=offsets[1:])
        groups = np.full(len(new), self._group, np.int64)
        responses = np.asarray(running, np.int64)
        flat = np.concatenate(new)
        start = time.perf_counter()
        self._drafter.append_batch(groups, responses, offsets, flat)
        if self._batch is not None:
            self._learn(self._batch, accepted)
        return time.perf_counter() - start

    def _learn(self, batch: DraftBatch, accepted: list[int]) -> None:
        told, right = acceptance.judge(batch.cells.shape[1], batch.num_tokens, np.asarray(accepted, np.int32))
        self.table = acceptance.update_acceptance(self.table, batch.cells[told], right[told])
        self._batch = None

    def end(self) -> None:
        self._drafter.drop_group(self._group)


def read_groups(path: Path) -> Iterator[tuple[str, list[str]]]:
    """(prompt, responses) of each (model, prompt id) in the file, in its order."""
    groups: dict[tuple[str, str], tuple[str, list[str]]] = {}
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open() as lines:
        for line in lines:
            record = json.loads(line)
            key = (str(record.get("model")), str(record["prompt_id"]))
            groups.setdefault(key, (record["prompt"], []))[1].append(record["response"])
    yield from (group for group in groups.values() if len(group[1]) > 1)


def load_tokenizer() -> Any:
    """The byte-pair tokenizer that mistral_common ships."""
    import mistral_common
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    return Tekkenizer.from_file(Path(mistral_common.__file__).parent / "data" / "tekken_240911.json")


def replay(
    system: System, group: int, prompt: np.ndarray, responses: list[np.ndarray], limit: int, tally: Tally
) -> None:
    """Advance all responses of a group in lockstep to their ends; the first token comes with the prefill."""
    system.begin(group, prompt, responses)
    done = [1] * len(responses)
    running = [r for r, tokens in enumerate(responses) if len(tokens) > 1]
    tally.seconds += system.append(running, [responses[r][:1] for r in running], [0] * len(running))
    while running:
        drafts, seconds = system.draft(running, [done[r] for r in running], limit)
        tally.seconds += seconds
        accepted = [agree(draft, responses[r], done[r]) for draft, r in zip(drafts, running, strict=True)]
        new = [responses[r][done[r] : done[r] + a + 1] for a, r in zip(accepted, running, strict=True)]
        tally.steps += len(running)
        tally.drafted += sum(len(draft) for draft in drafts)
        tally.accepted += sum(accepted)
        tally.tokens += sum(len(tokens) for tokens in new)
        tally.seconds += system.append(running, new, accepted)
        for r, tokens in zip(running, new, strict=True):
            done[r] += len(tokens)
        running = [r for r in running if done[r] < len(responses[r])]
    system.end()


def agree(draft: list[int], response: np.ndarray, start: int) -> int:
    """Draft tokens that equal the recorded continuation."""
    count = 0
    for token, actual in zip(draft, response[start : start + len(draft)].tolist(), strict=False):
        if token != actual:
            break
        count += 1
    return count


def build_systems(floor: float, depth: int) -> list[System]:
    systems: list[System] = []
    try:
        systems.append(Arctic("arctic default", 1.0, 0.1))
        systems.append(Arctic("arctic best", 4.0, 0.0))
    except ImportError:
        print("arctic_inference is not installed: its rows are left out")
    prior = suffix.prior_calibration()
    systems.append(Ours("paceline suffix", suffix.SuffixForest(max_depth=depth), prior, floor))
    apart = suffix.SuffixForest(max_depth=depth, shared_depth=0)
    systems.append(Ours("paceline, groups apart", apart, prior, floor))
    systems.append(Ours("n-gram lookup", lookup.LookupDrafter(), lookup.prior_calibration(), floor))
    return systems


def compare(rows: list[dict[str, Any]]) -> None:
    """Add the ratios to Arctic's better setting."""
    best = max(
        (row for row in rows if row["system"].startswith("arctic")),
        key=lambda row: row["acceptance_length"],
        default=None,
    )
    if best is None:
        return
    for row in rows:
        row["length_ratio"] = row["acceptance_length"] / best["acceptance_length"]
        row["time_ratio"] = best["us_per_token"] / row["us_per_token"]


@dataclass(frozen=True)
class Case:
    """Recorded groups to replay."""

    file: Path
    num_groups: int
    group_size: int

    @property
    def name(self) -> str:
        """As the case is written, without folder and endings."""
        size = f":{self.group_size}" if self.group_size != ALL_RESPONSES else ""
        return f"{self.file.name.partition('.')[0]}:{self.num_groups}{size}"


def read_case(text: str) -> Case:
    """`FILE:GROUPS[:RESPONSES]`; ArgumentTypeError: not that, or no such file."""
    name, *numbers = text.split(":")
    if not 1 <= len(numbers) <= 2 or not all(number.isdigit() for number in numbers):
        raise argparse.ArgumentTypeError(f"{text!r}: write FILE:GROUPS or FILE:GROUPS:RESPONSES")
    if not Path(name).is_file():
        raise argparse.ArgumentTypeError(f"{name} does not exist: give recorded responses")
    num_groups, group_size = (*map(int, numbers), ALL_RESPONSES)[:2]
    return Case(Path(name), num_groups, group_size)


def run(case: Case, tokenizer: Any, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each drafter, each new to the case."""
    systems = build_systems(arguments.floor, arguments.depth)
    tallies = {system.name: Tally() for system in systems}
    for number, (prompt, texts) in enumerate(islice(read_groups(case.file), case.num_groups)):
        prompt_ids = encode(tokenizer, prompt)
        responses = [encode(tokenizer, text) for text in texts[: case.group_size]]
        turn = number % len(systems)
        for system in systems[turn:] + systems[:turn]:
            replay(system, number, prompt_ids, responses, arguments.draft_tokens, tallies[system.name])
    rows = [{"case": case.name, **tally.row(name)} for name, tally in tallies.items()]
    compare(rows)
    return rows


def encode(tokenizer: Any, text: str) -> np.ndarray:
    return np.asarray(tokenizer.encode(text, bos=False, eos=False), dtype=np.int32)


def main() -> None:
    made = parser(__doc__)
    made.add_argument(
        "--cases", type=read_case, nargs="+", default=DEFAULT_CASES, help="FILE:GROUPS[:RESPONSES]"
    )
    made.add_argument("--draft-tokens", type=int, default=8, help="longest draft (K)")
    made.add_argument("--floor", type=float, default=0.02, help="least path probability of a draft")
    made.add_argument("--depth", type=int, default=24, help="longest context of our trie, tokens")
    arguments = made.parse_args()
    if arguments.cases is DEFAULT_CASES:
        arguments.cases = [read_case(text) for text in DEFAULT_CASES]
    tokenizer = load_tokenizer()
    rows = [row for case in arguments.cases for row in run(case, tokenizer, arguments)]
    arguments.cases = [case.name for case in arguments.cases]
    publish("drafting", rows, COLUMNS, arguments)


if __name__ == "__main__":
    main()
