"""Coupled or decoupled: does an engine's model drafter take turns with the target, each with all cores, or draft ahead?

Ahead it has a core of its own, which the target then lacks (SpecActor 4.1). Which is faster depends on batch, drafter
and machine, so both are measured: the tokens per second of whole steps.

* What is better so far is the home of a size, which is a power of two of requests. The other mode is tried now and
  then: `TRIAL_STEPS` steps that count, behind some that do not (`SETTLING_STEPS`). A trial that falls far behind ends
  early.
* A trial is compared with what the home would have brought in the same time at the same numbers of requests and about
  the same contexts: trials begin where a rollout begins, and the last one has ended with longer, slower ones. Steps at
  numbers at which the home was not measured say nothing, and send the engine back.
* The better of the two is home afterwards. The next trial comes when one like it would cost `TRIAL_COST` of the time:
  what is about as good is tried often, what is far worse seldom. A home that is new has to be confirmed sooner, after
  `LEAST_STEPS`, twice as many and so on: the machine may have been busy during its trial, or before.
* A worker that has rested must read before it drafts, and what a token of that costs is measured too. A trial that
  is due begins when the reading that comes with it costs `TRIAL_COST` of the time at this size since the last one
  (`FIRST_COST` where the size has no home of its own, or a new one): sooner where a rollout begins, and responses are
  short, than in its tail.
* A new size goes on with its own home, once it lasts, or with what there is where that was never found out. A trial
  goes on in it if one is due there too; one that is interrupted is put off, for twice as long each time, and what it
  has found is kept.

Differs: SpecActor's algorithm 2 compares both modes by formulas, from one D and one V. Here V has other cores in either
mode, and D may be another device's; decision 0040.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.types import StepObservation

SETTLING_STEPS = 12
"""Steps after a change that tell nothing; a size that has lasted so long may change the mode."""

FIRST_STEPS = 24
"""The same when a worker has come, as its beginning takes time of a core, and of the first steps ahead, in which the
worker learns how sure it is, and the budget what steps take."""

MOST_READING_STEPS = 128
"""Steps ahead without a draft, in which the worker reads what was written while it rested; beyond, they count."""

TRIAL_STEPS = 48
"""Steps of a trial that count; as many come before the first."""

MOST_AWAY_STEPS = 4 * TRIAL_STEPS + MOST_READING_STEPS
"""Steps that a trial takes at most, others than those that tell something among them, and as many to read."""

EARLY_STEPS = 16
"""Steps after which a trial may end early, if it is `FAR_BEHIND`."""

FAR_BEHIND = 0.75
"""Of what the home would have brought."""

TRIAL_COST = 1.0 / 64.0
"""Share of the time that trials may cost."""

FIRST_COST = 1.0 / 16.0
"""The same for the reading before a size's first decision, and before the first trial of a home that is new; half as
much before its next.
"""

LEAST_STEPS = 192
"""From a trial to the next."""

PUT_OFF_STEPS = 32
"""Until a trial goes on that was interrupted for the first time, at the earliest."""

MEMORY = 1.0 - 1.0 / 128.0
"""What a step counts for one step later."""

KNOWN_STEPS = 12.0
"""A mode is known at a number of requests that has had so many steps."""

LONGEST_STEP = 3.0
"""A step counts for so many times the mean at most: a machine may stand still for a moment."""

_EVERYTHING = 1 << 40
_PRICE_KEPT = 0.5  # what a reading counts one later, in the price of a token
_NUM_SIZES = 12
_NUM_COUNTS = 16 + 4 * (_NUM_SIZES - 4)
_SHORT_BITS, _NUM_CONTEXTS = 8, 17  # powers of two of context tokens, the shortest together
_MOST_DOUBLINGS = 8


@dataclass(frozen=True, slots=True)
class Rate:
    """Decayed sums over steps of one mode."""

    steps: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: float, seconds: float) -> Rate:
        return Rate(self.steps * MEMORY + 1.0, self.tokens * MEMORY + tokens, self.seconds * MEMORY + seconds)

    @property
    def is_known(self) -> bool:
        return self.steps >= KNOWN_STEPS

    def clip(self, seconds: float) -> float:
        """The seconds of a step, as they count."""
        return min(seconds, LONGEST_STEP * self.seconds / self.steps) if self.is_known else seconds


@dataclass(slots=True)
class Size:
    """What is known of batches of a power of two of requests, or more."""

    is_ahead: bool | None = None
    """Home; None: no trial has been decided."""
    until_trial: int = TRIAL_STEPS
    """Steps at home, that count, until the next one begins or goes on, at the earliest."""
    tries_ahead: bool = True
    """What the present trial, which may have had parts before, tries."""
    tried: int = 0
    """Its steps that count."""
    tokens: float = 0.0
    """What they have brought."""
    home_tokens: float = 0.0
    """What the home would have."""
    away: int = 0
    """Steps that its earlier parts have taken."""
    interruptions: int = 0
    """Of that trial."""
    confirmations: int = 0
    """Trials in a row that have found the same home."""
    since_s: float = 0.0
    """Seconds of the steps at home, that count, since the last trial began here, or was decided."""


@dataclass(slots=True)
class Coupling:
    """Where an engine stands; it begins coupled. Nothing but what is told here decides about the next step."""

    is_ahead: bool = False
    """How the next step drafts."""
    is_home_ahead: bool = False
    """How the present size drafts where nothing is tried."""
    is_trial: bool = False
    """Whether the engine is away from home to find out."""
    settling: int = FIRST_STEPS
    """Steps still to come that do not count."""
    reading: int = 0
    """The same, at most, until the worker has drafted."""
    away: int = 0
    """Steps of the present part of a trial."""
    lasted: int = 0
    """Steps in a row of the present size."""
    num_ahead: int = 0
    """Steps that were drafted for ahead."""
    unread: int = 0
    """Tokens that have come since the worker rests, those of responses that have ended among them; 0 once it has
    drafted.
    """
    read: int = 0
    """Those of them that it has to read, ahead, before it drafts; 0 where what that costs cannot be told."""
    lost_s: float = 0.0
    """What that has cost so far: seconds beyond those that the home would have taken for the same tokens."""
    priced: float = 0.0
    """The same of changes before, decayed: tokens that were read."""
    priced_s: float = 0.0
    """And what they have cost."""
    drafted: float = 0.0
    """Draft tokens verified in steps for which the model has drafted inside, decayed."""
    drafted_s: float = 0.0
    """What that took."""
    at: int = -1
    """The present size; -1: there was no step."""
    sizes: list[Size] = field(default_factory=lambda: [Size() for _ in range(_NUM_SIZES)])
    rates: list[tuple[Rate, Rate]] = field(
        default_factory=lambda: [(Rate(), Rate())] * (_NUM_COUNTS * _NUM_CONTEXTS)
    )
    """Coupled and ahead, by number of requests, up to 16 each, beyond four to a power of two; then by their context
    tokens, powers of two.
    """

    @property
    def size(self) -> Size:
        """What is known of the present size."""
        return self.sizes[self.at]

    @property
    def token_s(self) -> float:
        """What a token costs that the worker has to read: before it has read any, as much as one that was drafted
        inside and verified, and nothing where none was.
        """
        if self.priced:
            return self.priced_s / self.priced
        return self.drafted_s / self.drafted if self.drafted else 0.0

    @classmethod
    def without_worker(cls, at: int) -> Coupling:
        """Where an engine stands while nobody can draft ahead: whoever comes is tried anew, and has to read everything.

        at: the present size.
        """
        return cls(at=at, unread=_EVERYTHING)

    def begin_again(self) -> None:
        """Drafting was switched off: coupled, with what is known."""
        self._price(is_whole=False)
        self.is_ahead = self.is_home_ahead = self.is_trial = False
        self.settling, self.at = SETTLING_STEPS, -1
        self.reading = self.away = self.lasted = 0

    def after_step(self, step: StepObservation) -> None:
        """A step was measured, the drafter's time in it told apart. Others than typical ones without prefill tell
        nothing, but for what the worker has to read.
        """
        if not self.is_ahead:
            self._write(step)
        if self.is_trial:
            self.away += 1
            if self.away > MOST_AWAY_STEPS:
                self._put_off()
                self._go(self.is_home_ahead)
                return
        count = step.num_requests
        if not count or step.num_prefill_tokens or not step.is_typical:
            return
        at = min(count.bit_length() - 1, _NUM_SIZES - 1)
        if at != self.at:
            self._resize(at)
        self.num_ahead += self.is_ahead
        self.lasted += 1
        tokens, seconds = count + step.num_accepted_tokens, step.step_s + step.draft_s
        if self.is_ahead and any(step.ahead_tokens):
            was_reading = self.reading > 0
            if was_reading or self.unread:
                self._end_reading(step)
            if was_reading:
                return
        elif self.reading:
            self._read(step, tokens, seconds)
            return
        if self.settling:
            self.settling -= 1
        else:
            self._count(count, tokens, seconds, step.num_context_tokens)

    def _write(self, step: StepObservation) -> None:
        """A coupled step: what it brings the worker will have to read."""
        self.unread += step.num_requests + step.num_accepted_tokens + step.num_prefill_tokens
        if step.draft_s and step.num_draft_tokens:
            self.drafted = self.drafted * MEMORY + step.num_draft_tokens
            self.drafted_s = self.drafted_s * MEMORY + step.draft_s

    def _end_reading(self, step: StepObservation) -> None:
        """The worker has drafted: what it has read does not count against its trial."""
        self._price(is_whole=self.reading > 0 and step.num_context_tokens >= self.read)
        if self.reading:
            self.away = 0
        self.unread = self.reading = 0

    def _read(self, step: StepObservation, tokens: int, seconds: float) -> None:
        """A step ahead in which the worker still reads; where there is no rate to compare it with it tells nothing."""
        self.reading -= 1
        home = self._home(_place(step.num_requests, step.num_context_tokens))
        if home.is_known:
            self.lost_s += home.clip(seconds) - tokens * home.seconds / home.tokens
            self.read = self.read or min(self.unread, step.num_context_tokens)

    def _price(self, *, is_whole: bool) -> None:
        """The worker has read: what did that cost? is_whole: False where it was cut short, or not measured to its end:
        at least so much.
        """
        read, lost_s = self.read, max(self.lost_s, 0.0)
        self.read, self.lost_s = 0, 0.0
        if read and (is_whole or lost_s > self.token_s * read):
            kept = _PRICE_KEPT if is_whole else 0.0
            self.priced = kept * self.priced + read
            self.priced_s = kept * self.priced_s + lost_s

    def _count(self, count: int, tokens: int, seconds: float, context: int) -> None:
        """A step of so many requests, with so many tokens of context, tells what the present mode brings."""
        place = _place(count, context)
        inside, ahead = self.rates[place]
        seconds = (ahead if self.is_ahead else inside).clip(seconds)
        self.rates[place] = (
            (inside, ahead.add(tokens, seconds)) if self.is_ahead else (inside.add(tokens, seconds), ahead)
        )
        home = self._home(place)
        size, is_settled = self.size, self.lasted >= SETTLING_STEPS
        if self.is_ahead == self.is_home_ahead:
            size.until_trial = max(size.until_trial - 1, 0)
            size.since_s += seconds
            if not size.until_trial and is_settled and home.is_known:
                self._begin_trial(home, min(self.unread, context))  # unread of the responses that run
            return
        if home.is_known:
            if size.tries_ahead != self.is_ahead:  # no home of its own, and others' has changed since
                size.tries_ahead = self.is_ahead
                size.tokens, size.home_tokens = size.home_tokens, size.tokens
            size.tried += 1
            size.tokens += tokens
            size.home_tokens += home.tokens / home.seconds * seconds
            is_lost = size.tried >= EARLY_STEPS and size.tokens < FAR_BEHIND * size.home_tokens
            if is_lost or size.tried >= TRIAL_STEPS:
                self._decide()
                return
        elif self.is_trial:
            self._put_off()
            self._go(self.is_home_ahead)
            return
        if is_settled and not self.is_trial:
            self._go(self.is_home_ahead)

    def _begin_trial(self, home: Rate, unread: int) -> None:
        """A trial is due: it begins unless what the worker has to read before it, or behind one away from ahead, costs
        too much.
        """
        read = home.tokens / home.steps * (SETTLING_STEPS + TRIAL_STEPS) if self.is_ahead else unread
        cost = max(FIRST_COST / (1 << self.size.confirmations), TRIAL_COST)
        if read * self.token_s <= cost * self.size.since_s:
            self.size.since_s = 0.0
            self._go(not self.is_ahead, is_trial=True)

    def _decide(self) -> None:
        """The present size's trial is over: the better mode is its home."""
        size = self.size
        is_better = size.tokens > size.home_tokens
        is_ahead = self.is_ahead if is_better else self.is_home_ahead
        confirmations = min(size.confirmations + 1, _MOST_DOUBLINGS) if is_ahead == size.is_ahead else 0
        loss = 1.0 - min(size.tokens, size.home_tokens) / max(size.tokens, size.home_tokens)
        price = int((size.away + self.away + SETTLING_STEPS) * loss / TRIAL_COST)
        until = max(LEAST_STEPS, min(price, LEAST_STEPS << confirmations))
        self.sizes[self.at] = Size(is_ahead, until, confirmations=confirmations)
        self.is_home_ahead = is_ahead
        self._go(is_ahead)

    def _resize(self, at: int) -> None:
        """The batch has another size now."""
        new, was_trial = self.sizes[at], self.is_trial
        home = self.is_home_ahead if new.is_ahead is None else new.is_ahead
        goes_on = was_trial and self.is_ahead != home and new.until_trial <= TRIAL_STEPS // 2
        if goes_on:
            self.size.away += self.away
        elif was_trial:
            self._put_off()
        self.at, self.is_home_ahead, self.is_trial, self.lasted, self.away = at, home, goes_on, 0, 0
        if was_trial and not goes_on:
            self._go(home)

    def _put_off(self) -> None:
        """The present size's trial goes on later."""
        size = self.size
        size.until_trial = PUT_OFF_STEPS << min(size.interruptions, _MOST_DOUBLINGS)
        size.away += self.away
        size.interruptions += 1

    def _go(self, is_ahead: bool, *, is_trial: bool = False) -> None:
        """Draft so from now on."""
        if self.read and not is_ahead:
            self._price(is_whole=False)
        if is_ahead != self.is_ahead:
            self.settling = max(SETTLING_STEPS, FIRST_STEPS - self.num_ahead) if is_ahead else SETTLING_STEPS
            self.reading = MOST_READING_STEPS if is_ahead else 0
        self.is_ahead, self.is_trial, self.away = is_ahead, is_trial, 0

    def _home(self, place: int) -> Rate:
        """The home's rate there; where that is not known that at the nearest shorter contexts, taken to be no lower."""
        for at in range(place, place - place % _NUM_CONTEXTS - 1, -1):
            rate = self.rates[at][self.is_home_ahead]
            if rate.is_known:
                return rate
        return self.rates[place][self.is_home_ahead]


def _place(count: int, context: int) -> int:
    """Where the rates of so many requests with so many tokens of context are."""
    power = min(count.bit_length() - 1, _NUM_SIZES - 1)
    at = count - 1 if count <= 16 else min(15 + 4 * (power - 4) + (count >> (power - 2)) - 4, _NUM_COUNTS - 1)
    length = min(max(context.bit_length() - _SHORT_BITS, 0), _NUM_CONTEXTS - 1)
    return at * _NUM_CONTEXTS + length
