"""The pure decisions: `decide(snapshot, state, config) -> decision`, `update(state, observation) -> state`.

Nothing here reads a clock, draws from a global generator, does I/O or logs; time and randomness come in as
values. The engine's scheduler, the fleet's controller and the simulator call the very same functions.
Decisions of the fast loop (every engine step, tens of microseconds each):

    latency.py      how long would a step over n tokens take?
    acceptance.py   how likely is a draft token of this kind to be accepted?
    sharpness.py    how greedily should a drafter throw the shared dice?
    budget.py       which draft tokens does this step verify, and how deep should a model drafter draft?
    bandit.py       TLT's bucketed epsilon-greedy bandit, one of the budget's policies
"""
