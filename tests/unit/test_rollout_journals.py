"""Journals of training rollouts: of the same step with the same weights alone, and until a checkpoint holds them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from reports import pack

from paceline.control.events import Keep
from paceline.engine.rollout_engine import TokenEvent
from paceline.training.rollout_journals import RolloutJournals
from paceline.training.rollouts import WatchedRollouts
from paceline.types import DrafterScore, Response, RolloutRequest

torch = pytest.importorskip("torch", reason="torch is not installed")

WHY = "ended with 'error': NaN"
REQUESTS = [RolloutRequest((1, 2), 9, key=key, group=0, sample=key) for key in range(4)]


def push(journals: RolloutJournals, *values: float) -> None:
    weights = [(f"layer.{i}", torch.full((50, 200), value)) for i, value in enumerate(values)]
    assert [name for name, _ in journals.watch(weights)] == [name for name, _ in weights]


def keep(journals: RolloutJournals, step: int) -> None:
    journal = journals.open(step, "params")
    journal.find(REQUESTS)
    journal.write([Keep(0, 0, pack((4, 5)), 2, 0, "stop")])
    journal.close()


def find(journals: RolloutJournals, step: int, params: str = "params") -> list[int]:
    journal = journals.open(step, params)
    found = list(journal.find(REQUESTS))
    journal.close()
    return found


def test_a_step_is_found_again_with_the_same_weights(tmp_path: Path) -> None:
    journals = RolloutJournals(tmp_path)
    push(journals, 1.0, 2.0)
    keep(journals, 7)
    again = RolloutJournals(tmp_path)
    push(again, 1.0, 2.0)
    assert find(again, 8) == []
    assert find(again, 7) == [0]
    assert find(again, 7, "other params") == [], "and the journal begins anew"
    assert find(again, 7) == []


@pytest.mark.parametrize("place", [0, 199, 5000, 9999])
def test_other_weights_have_other_responses(tmp_path: Path, place: int) -> None:
    journals = RolloutJournals(tmp_path)
    push(journals, 1.0, 2.0)
    keep(journals, 7)
    updated = torch.full((50, 200), 2.0)
    updated.view(-1)[max(place - 20, 0) : place + 20] += 2**-20  # an update changes nearly all
    list(journals.watch([("layer.0", torch.full((50, 200), 1.0)), ("layer.1", updated)]))
    assert find(journals, 7) == []


def test_half_precision_and_odd_shapes_have_digests(tmp_path: Path) -> None:
    journals = RolloutJournals(tmp_path)
    digests = set()
    for tensor in (
        torch.ones(3, 5, dtype=torch.bfloat16),
        torch.ones(5, 3, dtype=torch.bfloat16),
        torch.ones(3, 5, dtype=torch.float16),
        torch.tensor(2.5),
        torch.ones(20_000, 3).t(),
        torch.nn.Parameter(torch.zeros(7)),
    ):
        list(journals.watch([("a", tensor)]))
        digests.add(journals._weights)
    assert len(digests) == 6


def test_journals_are_removed_once_a_checkpoint_holds_their_steps(tmp_path: Path) -> None:
    journals = RolloutJournals(tmp_path)
    for step in (9, 10, 11):
        keep(journals, step)
    journals.forget(10)
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["step-11"]
    journals.clear()
    assert not (tmp_path / "rollouts").exists()
    journals.forget(11)


@dataclass
class Engine:
    """Generates key, key, .. and dies when it has finished `most` responses; those of the keys in `failing` fail."""

    most: int = 99
    failing: tuple[int, ...] = ()
    policy_version: int = 3
    asked: list[int | None] = field(default_factory=list)

    def stream(
        self, requests: Sequence[RolloutRequest], params: Any, *, on_failure: str = "raise"
    ) -> Iterator[TokenEvent]:
        for index, request in enumerate(requests):
            if index == self.most:
                raise KeyboardInterrupt
            self.asked.append(request.key)
            tokens = (request.key or 0,) * 5
            logprobs = (-0.5,) * 5
            response = Response(request, tokens, logprobs, "stop", request.key or 0, 0, 3, 7, 2, 3)
            if request.key in self.failing:
                assert on_failure == "deliver"
                response = replace(response, finish_reason="error", failure=WHY)
            yield TokenEvent(index, tokens, logprobs, response)

    def take_observations(self) -> list[Any]:
        return []

    def drafter_score(self) -> DrafterScore:
        return DrafterScore()


def test_one_engine_generates_what_is_missing(tmp_path: Path) -> None:
    journals = RolloutJournals(tmp_path)
    record: Any = SimpleNamespace(now_s=lambda: 1.0)
    quiet: Any = SimpleNamespace(check=lambda: None, show_rollout=lambda meter: None)

    def run(engine: Any) -> tuple[Response, ...]:
        journal = journals.open(4, "params")
        try:
            return WatchedRollouts(engine, record, quiet, quiet).run(REQUESTS, None, 4, journal).responses  # type: ignore[arg-type]
        finally:
            journal.close()

    with pytest.raises(KeyboardInterrupt):
        run(Engine(most=3))
    engine = Engine()
    found = run(engine)
    assert engine.asked == [3]
    assert found == tuple(
        WatchedRollouts(Engine(), record, quiet, quiet).run(REQUESTS, None, 4).responses  # type: ignore[arg-type]
    )


def test_one_engine_delivers_a_failure_and_a_resumed_step_generates_it_again(tmp_path: Path) -> None:
    journals, notes = RolloutJournals(tmp_path), list[str]()
    record: Any = SimpleNamespace(now_s=lambda: 1.0, write=lambda note: notes.append(note.text))
    quiet: Any = SimpleNamespace(check=lambda: None, show_rollout=lambda meter: None)
    for asked in ([0, 1, 2, 3], [1]):
        journal, engine = journals.open(4, "params"), Engine(failing=(1,))
        rollout = WatchedRollouts(engine, record, quiet, quiet).run(REQUESTS, None, 4, journal)  # type: ignore[arg-type]
        journal.close()
        assert engine.asked == asked
        assert [r.failure for r in rollout.responses] == [None, WHY, None, None]
        assert rollout.rewards == (None, 0.0, None, None)
    assert notes == 2 * [f"1 of 4 responses have no reward of their own: it {WHY}"]
