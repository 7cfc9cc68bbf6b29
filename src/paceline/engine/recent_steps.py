"""What an engine's last steps and model drafts were like, as means: for those who decide about its help."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.engine.left_drafts import KEPT
from paceline.planning.acceptance import Outcomes
from paceline.types import StepObservation


@dataclass(slots=True)
class RecentSteps:
    """Decayed sums over the last steps and model drafts."""

    num_decoded: float = 0.0
    """(request, step) pairs, as are the drafts and accepted tokens of these."""
    num_drafted: float = 0.0
    num_accepted: float = 0.0
    num_steps: float = 0.0
    drafting_s: float = 0.0
    """What drafting inside took in these steps."""
    num_right: float = 1.0
    """Of `num_told` tokens of the model drafter; a coin's before there are any."""
    num_told: float = 2.0

    def note_step(self, step: StepObservation, drafting_s: float) -> None:
        """A measured step."""
        if step.num_requests:
            self.num_steps = KEPT * self.num_steps + 1.0
            self.drafting_s = KEPT * self.drafting_s + drafting_s
            self.num_decoded = KEPT * self.num_decoded + step.num_requests
            self.num_drafted = KEPT * self.num_drafted + step.num_draft_tokens
            self.num_accepted = KEPT * self.num_accepted + step.num_accepted_tokens

    def note_drafts(self, outcomes: Outcomes) -> None:
        """Of the model's drafts."""
        self.num_right = KEPT * self.num_right + float(outcomes.accepted.sum())
        self.num_told = KEPT * self.num_told + float(outcomes.verified.sum())

    def forget_drafts(self) -> None:
        """Another model drafts."""
        self.num_right, self.num_told = 1.0, 2.0

    @property
    def tokens_per_step(self) -> float:
        """Of a response."""
        return 1.0 + self.num_accepted / self.num_decoded

    @property
    def step_tokens(self) -> float:
        """Of a response, draft tokens included."""
        return 1.0 + self.num_drafted / self.num_decoded

    @property
    def inside_s(self) -> float:
        """What drafting inside adds to a step."""
        return self.drafting_s / self.num_steps

    @property
    def acceptance(self) -> float:
        """Of the model drafter inside the engine."""
        return self.num_right / self.num_told
