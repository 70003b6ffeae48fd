"""What one `generate` call with a drafter did."""

from dataclasses import dataclass, field


@dataclass
class DraftStats:
    """
    Counts of one `generate` call, over its rounds: the verifications that followed the prefill.

    Attributes:
        rounds (`int`): Verifications.
        drafted (`int`): Tokens proposed.
        accepted (`int`): Proposed tokens that the target accepted and the output kept.
        committed (`int`): Tokens that the rounds added to the output, the target's own included.
        draft_stages (`int`): Blocks drafted.
        repaired (`int`):
            Proposed tokens that a selector put in the place of the drafter's most likely ones; when sampling, also
            those that it drew with the drafter's own probability.
        accepted_at (`list[int]`): How many rounds accepted the i-th drafted token.
        draft_seconds (`float`): Time spent drafting.
        verify_seconds (`float`): Time from the end of a draft to the end of its verification.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    committed: int = 0
    draft_stages: int = 0
    repaired: int = 0
    accepted_at: list[int] = field(default_factory=list)
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0

    _last_accepted = 0  # of the latest round; no annotation, so not a field

    @property
    def acceptance_length(self) -> float:
        """`float`: Committed tokens per round (τ); 0 before the first round."""
        return self.committed / self.rounds if self.rounds else 0.0

    def count_round(self, drafted: int, accepted: int):
        """Add a round that proposed `drafted` tokens, of which the target accepted the first `accepted`."""
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        self.committed += accepted + 1
        self.accepted_at.extend([0] * (drafted - len(self.accepted_at)))
        for slot in range(accepted):
            self.accepted_at[slot] += 1
        self._last_accepted = accepted

    def forget_last(self, tokens: int):
        """Take back the last `tokens` of the final round, which a stop rule cut off; its own token goes first."""
        self.committed -= tokens
        if tokens > 1:
            self.accepted -= tokens - 1
            kept = self._last_accepted - (tokens - 1)
            for slot in range(kept, self._last_accepted):
                self.accepted_at[slot] -= 1

    def summary(self) -> str:
        """One line for people."""
        repaired = f", {self.repaired} repaired" if self.repaired else ""
        return (
            f"{self.committed} tokens in {self.rounds} rounds, acceptance length {self.acceptance_length:.2f} "
            f"({self.accepted} of {self.drafted} drafted tokens accepted{repaired}); "
            f"drafting {self.draft_seconds:.2f} s, verifying {self.verify_seconds:.2f} s"
        )
