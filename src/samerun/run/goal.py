"""How far a run goes and when it saves on the way: pure arithmetic over progress."""

from __future__ import annotations

from dataclasses import dataclass

from samerun.core.progress import Progress
from samerun.core.units import Amount, AmountUnit, parse_amount
from samerun.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """`until=`: a number of updates, or an amount of samples, tokens or epochs."""

    amount: Amount
    samples_per_epoch: int | None

    @classmethod
    def parse(cls, until: int | str, *, samples_per_epoch: int | None) -> Goal:
        amount = parse_amount(until, bare=AmountUnit.UPDATES)
        if amount.unit is AmountUnit.SECONDS:
            raise UsageError(f"until={until!r}: a run ends after an amount of training; write it like until=2000")
        if amount.unit is AmountUnit.EPOCHS and samples_per_epoch is None:
            raise UsageError(
                f"until={until!r}: this data has no epochs of known length; give updates, samples or tokens"
            )
        return cls(amount=amount, samples_per_epoch=samples_per_epoch)

    def position(self, progress: Progress) -> float:
        """How far `progress` is, in the goal's own unit."""
        if self.amount.unit is AmountUnit.EPOCHS:
            assert self.samples_per_epoch is not None
            return int(progress.samples) / self.samples_per_epoch
        return int(getattr(progress, self.amount.unit.value))

    def is_reached(self, progress: Progress) -> bool:
        return self.position(progress) >= self.amount.value

    def describe(self, progress: Progress) -> str:
        return f"{self.position(progress):g} of {self.amount}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveInterval:
    """`save_every=`: by the clock of one rank, or by progress, where every rank knows by itself."""

    amount: Amount

    @classmethod
    def parse(cls, text: str) -> SaveInterval:
        amount = parse_amount(text)
        if amount.unit is AmountUnit.EPOCHS:
            raise UsageError(f"save_every={text!r}: write it like '10 min', '500 updates' or '2e9 tokens'")
        if not amount.value > 0:
            raise UsageError(f"save_every={text!r} would save at every edge; '1 updates' says that")
        return cls(amount=amount)

    @property
    def seconds(self) -> float | None:
        """The interval by the clock; None when it is counted in progress."""
        return self.amount.value if self.amount.unit is AmountUnit.SECONDS else None

    def has_crossed(self, before: Progress, now: Progress) -> bool:
        """Whether a multiple of the interval lies between the last save and now: the same after any resume."""
        if self.seconds is not None:
            return False
        every = int(self.amount.value)
        name = self.amount.unit.value
        return int(getattr(now, name)) // every > int(getattr(before, name)) // every
