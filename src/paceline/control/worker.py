"""A worker as the controller sees it: what its present life is about, and which chunks it runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from paceline.control.events import Report, RunChunk, WorkerUp
from paceline.control.helping import Door, Place
from paceline.control.live_response import LiveResponse, RunningChunk
from paceline.types import Progress, StepCosts

WorkerState = Literal["starting", "loading", "up", "drafting", "racing", "training", "given up"]


@dataclass(slots=True)
class Worker:
    """A place for an engine, and its present life."""

    name: str
    life: int = 0
    is_drafter: bool = False
    """Whether it drafts for others, and verifies nothing."""
    state: WorkerState = "starting"
    facts: WorkerUp | None = None
    costs: StepCosts | None = None
    """Of its steps, as told last."""
    progress: Progress | None = None
    """Of its life, as told last."""
    num_steps: int = 0
    """Of its life, as told last."""
    has_run: bool = False
    """Chunks, in this life."""
    has_generated: bool = False
    """In this life."""
    is_proven: bool = False
    """It has generated in some life, and given no response up since in a life that generated nothing."""
    may_help: bool = True
    """Drafting for others has not failed here in this rollout."""
    chunks: dict[int, RunningChunk] = field(default_factory=dict)
    """Those that run here, by number."""
    second: set[int] = field(default_factory=set)
    """Of them, those of responses that another worker ran when they came: only these can be copies."""
    new: dict[int, LiveResponse] = field(default_factory=dict)
    """The responses of those that have begun here and brought no token yet."""
    held: list[RunChunk] = field(default_factory=list)
    """Those that have not begun, because of a suspect."""
    num_fruitless: int = 0
    """Lives in a row that came to nothing."""
    waiting_since_s: float | None = None
    """When a tick first found that something is expected of it, in seconds that the driver has listened; None: nothing
    is, or it has just done something."""

    @property
    def place(self) -> Place:
        """Its present life."""
        return Place(self.name, self.life)

    @property
    def verifies(self) -> bool:
        """Whether responses run here."""
        return self.state == "up" and not self.is_drafter

    @property
    def copies(self) -> list[int]:
        """The chunks that others own and that run here too."""
        return sorted(number for number in self.second if self.chunks[number].response.owner != number)

    @property
    def door(self) -> Door | None:
        """Where others may draft for it."""
        return (self.place, self.facts.draft_addresses) if self.facts and self.facts.draft_addresses else None

    def hear(self, report: Report) -> None:
        """What a report tells of the worker itself."""
        if report.num_steps > self.num_steps:
            self.num_steps, self.waiting_since_s = report.num_steps, None
        self.costs = report.costs or self.costs
        self.progress = report.progress or self.progress
        self.may_help &= not report.has_failed_drafting

    def prove(self) -> None:
        """It has generated something."""
        self.has_generated = self.is_proven = True

    def begin(self, *, has_suspects: bool) -> list[RunChunk]:
        """What may begin: suspects first, each alone, on a worker that has worked if there is a choice.

        has_suspects: whether there can be any.
        """
        if not self.held or (has_suspects and any(response.is_suspect for response in self.new.values())):
            return []
        responses = {order.chunk: self.chunks[order.chunk].response for order in self.held}
        suspects = [order for order in self.held if responses[order.chunk].is_suspect]
        begun = [order for order in self.held if not responses[order.chunk].is_suspect]
        if suspects and self.new:
            return []
        if suspects and begun and not self.has_generated:
            begun = begun[:1]
        elif suspects:
            begun = [max(suspects, key=lambda order: responses[order.chunk].num_losses)]
        numbers = {order.chunk for order in begun}
        self.held = [order for order in self.held if order.chunk not in numbers]
        self.new |= {number: responses[number] for number in numbers}
        return begun

    def clear(self) -> dict[int, RunningChunk]:
        """Nothing runs here any more. Gives what had begun, by number."""
        held = {order.chunk for order in self.held}
        begun = {number: chunk for number, chunk in self.chunks.items() if number not in held}
        for found in (self.chunks, self.second, self.new, self.held):
            found.clear()
        return begun

    def end_life(self, *, is_fruitless: bool) -> None:
        """Its engine is gone; the next one is another life. is_fruitless: it counts as that without a token."""
        if self.has_generated:
            self.num_fruitless = 0
        elif is_fruitless and (self.state != "up" or self.has_run):
            self.num_fruitless += 1
        self.life += 1
        self.facts = self.costs = self.progress = self.waiting_since_s = None
        self.num_steps = 0
        self.has_run, self.has_generated, self.may_help = False, False, True
