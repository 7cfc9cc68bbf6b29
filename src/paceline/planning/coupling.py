"""Coupled or decoupled: does an engine's model drafter take turns with the target, each with all cores, or draft ahead?

Ahead it has a core of its own, which the target then lacks (SpecActor 4.1). Which is faster depends on batch, drafter
and machine, so both are measured: the tokens per second of whole steps, by batch size in powers of two.

* What is better so far is the engine's home. The other is tried now and then: `TRIAL_STEPS` steps that count, behind
  `SETTLING_STEPS` that do not, as caches are read up and step times learned. A trial that falls far behind ends early.
* The better of the two is home afterwards. The next trial comes when one like it would cost `TRIAL_COST` of the time:
  what is about as good is tried often, what is far worse seldom. A home that is new has to be confirmed sooner, after
  `LEAST_STEPS`, twice as many and so on: the machine may have been busy during its trial, or before.
* A new size goes on with its own home, or with what there is where that was never found out. A trial goes on in it if
  it has one before it too; one that is interrupted is put off, for twice as long each time, and goes on from where it
  was.

Differs: SpecActor's algorithm 2 compares both modes by formulas, from one D and one V. Here V has other cores in either
mode, and D may be another device's; decision 0040.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from paceline.types import StepObservation

SETTLING_STEPS = 12
"""Steps after a change that tell nothing."""

FIRST_STEPS = 48
"""The same when a worker has come, as a process that begins is busy on a core and steps were measured then; and of the
first steps ahead, in which the worker learns how sure it is, and the budget what steps take."""

TRIAL_STEPS = 48
"""Steps of a trial that count; as many come before the first."""

EARLY_STEPS = 16
"""Steps after which a trial may end early, if it is `FAR_BEHIND`."""

FAR_BEHIND = 0.75
"""Of the home's tokens per second."""

TRIAL_COST = 1.0 / 64.0
"""Share of the time that trials may cost."""

LEAST_STEPS = 192
"""From a trial to the next."""

PUT_OFF_STEPS = 32
"""Until a trial goes on that was interrupted for the first time."""

MEMORY = 1.0 - 1.0 / 128.0
"""What a step counts for one step later."""

BEFORE_TRIAL = 0.25
"""What older steps of a mode count for when its trial begins."""

_NUM_SIZES = 12
_MOST_DOUBLINGS = 8


@dataclass(frozen=True, slots=True)
class Rate:
    """Decayed sums over steps of one size and mode."""

    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: float, seconds: float) -> Rate:
        return Rate(self.tokens * MEMORY + tokens, self.seconds * MEMORY + seconds)

    def faded(self) -> Rate:
        """As its mode's next trial begins."""
        return Rate(self.tokens * BEFORE_TRIAL, self.seconds * BEFORE_TRIAL)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Size:
    """What is known of a batch size."""

    rates: tuple[Rate, Rate] = (Rate(), Rate())
    """Coupled, ahead."""
    is_ahead: bool | None = None
    """Its home; None: no trial has been decided."""
    until_trial: int = TRIAL_STEPS
    """Steps of this size, that count, until the next one begins or goes on."""
    trial_left: int = 0
    """Steps of a trial that has begun still to come."""
    tries_ahead: bool = True
    """What it tries."""
    interruptions: int = 0
    """Of that trial."""
    confirmations: int = 0
    """Trials in a row that have found the same home."""

    def put(self, is_ahead: bool, rate: Rate) -> Size:
        """With this rate of a mode."""
        coupled, ahead = self.rates
        return replace(self, rates=(coupled, rate) if is_ahead else (rate, ahead))


@dataclass(frozen=True, slots=True)
class Coupling:
    """Where an engine stands; it begins coupled."""

    is_ahead: bool = False
    """How the next step drafts."""
    settling: int = FIRST_STEPS
    """Steps still to come that do not count."""
    is_trial: bool = False
    """Whether that is tried out."""
    goes_back_ahead: bool = False
    """How the engine drafts where the trial is interrupted."""
    lasted: int = 0
    """Steps in a row of the present size."""
    num_ahead: int = 0
    """Steps that were drafted for ahead."""
    at: int = -1
    """The present size; -1: there was no step."""
    sizes: tuple[Size, ...] = field(default=(Size(),) * _NUM_SIZES)

    @property
    def size(self) -> Size:
        """What is known of the present size."""
        return self.sizes[self.at]


def after_step(coupling: Coupling, step: StepObservation) -> Coupling:
    """Where the engine stands after a measured step, the drafter's time in it told apart; others than typical ones
    without prefill tell nothing.
    """
    if not step.num_requests or step.num_prefill_tokens or not step.is_typical:
        return coupling
    tokens, seconds = step.num_requests + step.num_accepted_tokens, step.step_s + step.draft_s
    at = min(step.num_requests.bit_length() - 1, _NUM_SIZES - 1)
    if at != coupling.at:
        coupling = _resized(coupling, at)
    lasted, num_ahead = coupling.lasted + 1, coupling.num_ahead + coupling.is_ahead
    coupling = replace(coupling, lasted=lasted, num_ahead=num_ahead)
    if coupling.settling:
        return replace(coupling, settling=coupling.settling - 1)
    size, is_ahead = coupling.size, coupling.is_ahead
    size = size.put(is_ahead, size.rates[is_ahead].add(tokens, seconds))
    size = replace(size, until_trial=max(size.until_trial - 1, 0))
    coupling = _known(coupling, size)
    if coupling.is_trial:
        return _on_trial(coupling)
    if size.until_trial or lasted < SETTLING_STEPS:
        return coupling
    tried = size.tries_ahead if size.trial_left else not is_ahead
    return _go(_known(coupling, _begun(size, tried)), tried, is_trial=True)


def without_worker(coupling: Coupling) -> Coupling:
    """Where the engine stands while nobody can draft ahead: whoever comes is tried anew."""
    return replace(Coupling(), at=coupling.at)


def begin_again(coupling: Coupling) -> Coupling:
    """Where the engine stands where drafting was switched off: coupled, with what it knows."""
    return Coupling(settling=SETTLING_STEPS, num_ahead=coupling.num_ahead, sizes=coupling.sizes)


def _on_trial(coupling: Coupling) -> Coupling:
    """Go on with a trial, or decide it."""
    size, tried = coupling.size, coupling.is_ahead
    left = size.trial_left - 1
    own, home = size.rates[tried].tokens_per_s, size.rates[not tried].tokens_per_s
    is_lost = TRIAL_STEPS - left >= EARLY_STEPS and own < FAR_BEHIND * home
    if left and not is_lost:
        return _known(coupling, replace(size, trial_left=left))
    steps = 2 * SETTLING_STEPS + TRIAL_STEPS - left
    loss = 1.0 - min(own, home) / max(own, home)
    is_ahead = tried if own > home else not tried
    confirmations = min(size.confirmations + 1, _MOST_DOUBLINGS) if is_ahead == size.is_ahead else 0
    until = max(LEAST_STEPS, min(int(steps * loss / TRIAL_COST), LEAST_STEPS << confirmations))
    decided = _known(coupling, Size(size.rates, is_ahead, until, confirmations=confirmations))
    return _go(decided, is_ahead)


def _resized(coupling: Coupling, at: int) -> Coupling:
    """The batch has another size now."""
    new, home = coupling.sizes[at], coupling.is_ahead
    coupling = replace(coupling, lasted=0)
    if coupling.is_trial:
        home, num = coupling.goes_back_ahead, coupling.size.interruptions
        is_other = not new.trial_left or new.tries_ahead == coupling.is_ahead
        is_known = new.until_trial <= TRIAL_STEPS // 2 and new.rates[not coupling.is_ahead].seconds > 0.0
        if new.is_ahead is None and is_known and is_other:
            coupling = replace(coupling, at=at)
            return _known(coupling, _begun(new, coupling.is_ahead))
        until = PUT_OFF_STEPS << min(num, _MOST_DOUBLINGS)
        coupling = _known(coupling, replace(coupling.size, until_trial=until, interruptions=num + 1))
    return _go(replace(coupling, at=at), home if new.is_ahead is None else new.is_ahead)


def _begun(size: Size, is_ahead: bool) -> Size:
    """A trial of this mode begins, or goes on."""
    if size.trial_left:
        return size
    size = size.put(is_ahead, size.rates[is_ahead].faded())
    return replace(size, trial_left=TRIAL_STEPS, tries_ahead=is_ahead)


def _go(coupling: Coupling, is_ahead: bool, *, is_trial: bool = False) -> Coupling:
    """Draft so from now on."""
    settling = coupling.settling
    if is_ahead != coupling.is_ahead:
        settling = max(SETTLING_STEPS, FIRST_STEPS - coupling.num_ahead) if is_ahead else SETTLING_STEPS
    goes_back = coupling.is_ahead if is_trial else is_ahead
    return replace(
        coupling, is_ahead=is_ahead, settling=settling, is_trial=is_trial, goes_back_ahead=goes_back
    )


def _known(coupling: Coupling, size: Size) -> Coupling:
    """With this about the present size."""
    at = coupling.at
    return replace(coupling, sizes=(*coupling.sizes[:at], size, *coupling.sizes[at + 1 :]))
