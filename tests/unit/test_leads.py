"""What a racer is ahead by becomes drafts of the other one."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import BudgetSettings, EngineSettings
from paceline.drafting.tree import DraftTrees
from paceline.engine.draft_rows import table_of
from paceline.engine.fast_loop import FastLoop, Proposal
from paceline.engine.leads import Leads
from paceline.types import DraftQuery, StepObservation

SETTINGS = EngineSettings(
    drafter="none", adopt_leads=True, budget=BudgetSettings(policy="fixed", fixed_tokens=6)
)
PROMPT = [1, 2, 3]
TOKENS = list(range(10, 60))


def query(position: int, room: int = 8) -> DraftQuery:
    one = np.zeros(1, np.int64)
    return DraftQuery(
        one,
        one + 7,
        one.astype(np.uint64),
        one + position,
        np.ones(1, np.float32),
        np.full(1, room, np.int32),
    )


def open_loop() -> FastLoop:
    loop = FastLoop(SETTINGS)
    loop.open(0, 7, PROMPT, TOKENS[:2])
    return loop


def drafted(made: Proposal) -> list[int]:
    return made.batch.tokens[0, : made.lengths[0]].tolist()


def test_a_lead_is_drafted_and_counted() -> None:
    loop = open_loop()
    assert not loop.may_draft, "an engine without drafters decodes plainly until a racer is ahead"
    loop.adopt(7, 5, TOKENS[2:12])
    assert loop.may_draft
    made = loop.propose(query(5), 0)
    assert drafted(made) == TOKENS[2:8]
    loop.learn(made, made.lengths, table_of([TOKENS[2:9]]))
    told = loop.observe(StepObservation(1, 6, 6, 0, 0.01))
    assert (told.num_adopted_tokens, told.num_model_tokens) == (6, 0)
    loop.append([(0, 7, TOKENS[2:9])])
    loop.adopt(7, 15, TOKENS[12:20])
    assert drafted(loop.propose(query(12), 0)) == TOKENS[9:15]
    loop.append([(0, 7, TOKENS[9:30])])
    assert drafted(loop.propose(query(33), 0)) == []
    assert not loop.may_draft


def test_a_lead_ends_with_its_response_and_with_the_weights() -> None:
    loop = open_loop()
    loop.adopt(7, 5, TOKENS[2:12])
    loop.close(0, 7)
    assert not loop.may_draft
    loop.open(0, 7, PROMPT, TOKENS[:2])
    loop.adopt(7, 5, TOKENS[2:12])
    loop.forget_tokens()
    assert not loop.may_draft
    loop.set_drafting(False)
    loop.adopt(7, 5, TOKENS[2:12])
    assert not loop.may_draft
    plain = FastLoop(SETTINGS.model_copy(update={"adopt_leads": False}))
    plain.adopt(7, 5, TOKENS[2:12])
    assert not plain.may_draft


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(1, 8)), max_size=20))
def test_what_is_offered_is_what_the_leader_has_and_this_engine_has_not(
    events: list[tuple[int, int, int]],
) -> None:
    """(tokens that the leader tells, tokens that this engine generates by itself, room) of each step."""
    trees, told, position = DraftTrees(), 0, 0
    leads = Leads(trees)
    trees.open(7, np.empty(0, np.int32))
    names = np.array([7], np.int64)
    for more, own, room in events:
        if more and told + more > position:  # else it would not be new
            leads.tell(7, told, np.array(TOKENS[told : told + more] + [0] * 90, np.int32)[:more])
        told = max(told + more, position)
        leads.propose(query(position, room))
        made = trees.best(names, np.array([position], np.int64), np.full(1, room, np.int32))
        offered = made.tokens[0, : made.num_tokens[0]].tolist()
        truth = (TOKENS + [0] * 90)[position:]
        assert offered == truth[: len(offered)]
        if told > position and more:
            assert len(offered) == min(told - position, room)
        grown = np.array((TOKENS + [0] * 90)[position : position + own], np.int32)
        trees.advance(names, np.array([0, own], np.int32), grown)
        position += own
    assert bool(leads) <= (told > 0)
