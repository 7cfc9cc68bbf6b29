"""The pure decisions: `decide(snapshot, state, config) -> decision`, `update(state, observation) -> state`.

Nothing here reads a clock, draws from a global generator, does I/O or logs; time and randomness come in as
values. The engine's scheduler and the benchmarks call the very same functions.
Decisions of the fast loop (every engine step, tens of microseconds each):

    latency.py      how long would a step over n tokens take?
    acceptance.py   how likely is a draft token of this kind to be accepted?
    sharpness.py    how greedily should a drafter throw the shared dice?
    candidates.py   whose draft is offered when two drafters propose?
    budget.py       which draft tokens does this step verify?
    drafter_worth.py when does a model drafter draft, and how far?
    paths.py        which further draft paths are worth a row?
    bandit.py       TLT's bucketed epsilon-greedy bandit, one of the budget's policies
"""
