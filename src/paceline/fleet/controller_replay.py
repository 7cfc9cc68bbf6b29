"""Replay of a controller's decision log: a fresh controller is told the recorded events.

What happens in a fleet follows from what its controller decided, so behind the first difference the events answer
orders that were never given: there the replay ends.
"""

from __future__ import annotations

from itertools import zip_longest

import msgspec

from paceline.config import FleetSettings
from paceline.control.controller import Controller
from paceline.control.events import Event
from paceline.errors import RecordError
from paceline.fleet.controller_log import EVENTS, describe, describe_error
from paceline.record.damage import UNREADABLE
from paceline.record.decisions import ControllerLine, DecisionReader
from paceline.record.tally import Tally

Answer = tuple[str, tuple[str, ...], str | None]
"""The event's name, the actions, and what was raised instead."""


def replay_controller(reader: DecisionReader) -> list[Tally]:
    """Plan everything in a controller's log again. Raises RecordError for a damaged log."""
    controller = Controller(reader.settings(FleetSettings))
    tally = Tally("fleet controller")
    for line in reader:
        if not isinstance(line, ControllerLine):
            reader.refuse(line)
        if tally.num_different:
            tally.num_left += 1
            continue
        actions, error = _decide(controller, _read_event(reader, line))
        recorded: Answer = line.event, line.actions, line.error
        tally.compare(recorded, (line.event, actions, error), _tell)
    return [tally]


def _read_event(reader: DecisionReader, line: ControllerLine) -> Event:
    kind = EVENTS.get(line.event)
    if kind is None:
        raise RecordError(
            f"{reader.path} has an event {line.event!r}: this Paceline's fleet knows none of that name"
        )
    try:
        return msgspec.msgpack.decode(line.body, type=kind)
    except UNREADABLE as error:
        raise RecordError(
            f"{reader.path} has a {line.event} that is another one in this Paceline ({error}): replay it with Paceline "
            f"{reader.header.paceline}"
        ) from error


def _decide(controller: Controller, event: Event) -> tuple[tuple[str, ...], str | None]:
    try:
        return tuple(map(describe, controller.decide(event))), None
    except Exception as error:  # whatever a changed controller raises is what it does now
        return (), describe_error(error)


def _tell(one: Answer, other: Answer) -> str:
    """The first action in which two answers differ, or what was raised."""
    event, actions, error = one
    if error is not None:
        return f"on {event}: raises {error}"
    pairs = enumerate(zip_longest(actions, other[1]), start=1)
    place, mine = next(((place, mine) for place, (mine, theirs) in pairs if mine != theirs), (0, None))
    if mine is None:
        return f"on {event}: {len(actions)} actions, no further one" if actions else f"on {event}: nothing"
    return f"on {event}, action {place} of {len(actions)}: {mine}"
