"""What does the draft server give back of what is lost when a group is spread over workers?

Replays recorded responses as drafting.py does, the responses of each group dealt to `--workers` workers with suffix
trees of their own: alone, and with a `paceline draft-server` process between them. A step lasts `--step-ms` (10 to 100
in a real engine), during which the server passes on what the step before gave. `length_ratio` compares the acceptance
length with that of one worker that sees everything.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from itertools import islice
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from drafting import DEFAULT_GROUPS, Ours, Tally, encode, load_tokenizer, read_groups, replay
from harness import parser, publish

from paceline.drafting import suffix
from paceline.drafting.client import DraftClient
from paceline.drafting.server import DraftServer
from paceline.engine.sharing import SharedDrafts

COLUMNS = ("system", "acceptance_length", "length_ratio", "drafted_per_step", "us_per_token")


class Workers:
    """Workers that deal the responses of a group out among themselves; a `System` of drafting.py."""

    def __init__(self, name: str, count: int, address: str | None, options: argparse.Namespace) -> None:
        self.name, self._step_s = name, options.step_ms / 1e3
        self._forests = [suffix.SuffixForest(max_depth=options.depth) for _ in range(count)]
        self._parts = [
            Ours(f"{name} {i}", forest, suffix.prior_calibration(), options.floor)
            for i, forest in enumerate(self._forests)
        ]
        self._sharing = [
            None if address is None else SharedDrafts(DraftClient([address], interval_ms=options.interval_ms))
            for _ in range(count)
        ]
        self._group = 0

    def begin(self, group: int, prompt: np.ndarray, responses: list[np.ndarray]) -> None:
        self._group = group
        for part in self._parts:
            part.begin(group, prompt, responses)
        for response in range(len(responses)):
            if (sharing := self._sharing[response % len(self._parts)]) is not None:
                sharing.open(group, response, 1000 * group + response, [])

    def draft(self, running: list[int], done: list[int], limit: int) -> tuple[list[list[int]], float]:
        time.sleep(self._step_s)
        drafts: dict[int, list[int]] = {}
        seconds = 0.0
        for worker, part in enumerate(self._parts):
            start = time.perf_counter()
            if (sharing := self._sharing[worker]) is not None:
                sharing.take_over(self._forests[worker])
            seconds += time.perf_counter() - start
            mine = [i for i, r in enumerate(running) if r % len(self._parts) == worker]
            if mine:
                made, took = part.draft([running[i] for i in mine], [done[i] for i in mine], limit)
                drafts |= {running[i]: draft for i, draft in zip(mine, made, strict=True)}
                seconds += took
        return [drafts[r] for r in running], seconds

    def append(self, running: list[int], new: list[np.ndarray], accepted: list[int]) -> float:
        seconds = 0.0
        for worker, part in enumerate(self._parts):
            mine = [i for i, r in enumerate(running) if r % len(self._parts) == worker]
            if mine:
                seconds += part.append(
                    [running[i] for i in mine], [new[i] for i in mine], [accepted[i] for i in mine]
                )
            start = time.perf_counter()
            if (sharing := self._sharing[worker]) is not None:
                for i in mine:
                    sharing.grow(self._group, running[i], new[i].tolist())
            seconds += time.perf_counter() - start
        return seconds

    def end(self) -> None:
        for worker, part in enumerate(self._parts):
            if (sharing := self._sharing[worker]) is not None:
                sharing.forget()
            part.end()


def serve(pipe: Connection) -> None:
    """The server's process."""
    server = DraftServer("tcp://127.0.0.1:0", secret=None)
    pipe.send(server.address)
    server.serve()


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    address = ours.recv()
    systems = [Workers("one worker", 1, None, options)]
    for count in options.workers:
        systems.append(Workers(f"{count} workers, alone", count, None, options))
        systems.append(Workers(f"{count} workers, draft server", count, address, options))
    tallies = {system.name: Tally() for system in systems}
    tokenizer = load_tokenizer()
    for number, (prompt, texts) in enumerate(islice(read_groups(options.groups), options.num_groups)):
        prompt_ids = encode(tokenizer, prompt)
        responses = [encode(tokenizer, text) for text in texts]
        for at, system in enumerate(systems):  # groups of their own on the server
            group = len(systems) * number + at
            replay(system, group, prompt_ids, responses, options.draft_tokens, tallies[system.name])
    server.terminate()
    rows = [tally.row(name) for name, tally in tallies.items()]
    for row in rows:
        row["length_ratio"] = row["acceptance_length"] / rows[0]["acceptance_length"]
    return rows


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--groups", type=type(DEFAULT_GROUPS), default=DEFAULT_GROUPS, help="as drafting.py")
    made.add_argument("--num-groups", type=int, default=8)
    made.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    made.add_argument("--draft-tokens", type=int, default=8, help="longest draft (K)")
    made.add_argument("--floor", type=float, default=0.02, help="least path probability of a draft")
    made.add_argument("--depth", type=int, default=24, help="longest context of the trees, tokens")
    made.add_argument("--step-ms", type=float, default=20.0, help="how long a step lasts")
    made.add_argument("--interval-ms", type=float, default=20.0, help="how often clients speak to the server")
    options = made.parse_args()
    publish("draft_server", run(options), COLUMNS, options)


if __name__ == "__main__":
    main()
