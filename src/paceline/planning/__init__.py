"""The pure decisions: `decide(snapshot, state, config) -> decision`, `update(state, observation) -> state`.

Nothing here reads a clock, draws from a global generator, does I/O or logs; time and randomness come in as
values. Engine, simulator, replay and benchmarks call the very same functions.

Decisions of the fast loop (every engine step, tens of microseconds each):

    latency.py      how long would a step over n tokens take?
    acceptance.py   how likely is a draft token of this kind to be accepted?
    sharpness.py    how greedily should a drafter throw the shared dice?
    budget.py       which draft tokens does this step verify?
    drafter_worth.py when does a model drafter draft, and how far?
    paths.py        which further draft paths are worth a row?
    wait.py         does a step wait for drafts that a draft worker has under way?
    draft_ahead.py  which responses does a draft worker draft for next, and how far ahead?
    alternatives.py the same where only acceptance is known (plans, the simulator)
    captures.py     which step sizes are captured as CUDA graphs? (once, when the engine starts)
    bandit.py       TLT's bucketed epsilon-greedy bandit, one of the budget's policies

Decisions of speculation across workers (SpecActor), once per rollout or every thousand steps; made by the simulator and
the command `plan`, in live rollouts only where it says so:

    latency_profile.py how long do drafting and verifying take, by profile?
    profile_fit.py  the same, from a profile file
    window.py       what does a draft window yield, coupled or decoupled, and which is best?
    placement.py    on how many GPUs do drafters and verifiers run?
    composition.py  do drafters draft inside the engine, ahead on devices of their own, or not at all?
    reconfigure.py  which window and mode does a request that drafts badly go on with? (live, with a draft worker)
    ladder.py       with which drafter does a rollout begin? (live, on one engine)
    help.py         what does a worker that has fallen free do for the one that ends last? (live: draft for it)
    racing.py       which drafters join which requests when workers fall free?

Decisions of the slow loop (Seer, TLT), once per event of the fleet:

    length.py       how many tokens will a group's responses have?
    dispatch.py     which response runs its next chunk where, and how long is it?
    request_buffer.py where do responses wait meanwhile, and who has room for them?
    harvest.py      which idle workers train the drafter? (live: one at a time)
"""
