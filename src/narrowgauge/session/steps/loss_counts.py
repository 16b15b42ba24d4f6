"""How many losses of a program's evaluations were taken, and how many left out, with what a run says of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LossCounts:
    """Those of one program.

    Attributes:
        taken: that `eval_loss` is made of.
        sums: of these, over a batch and not its mean.
        several: of these, of what the one before was computed of.
        aside, alone: of models that do not train, that were left out, or that were all there was.
        numbers, rows: that calls returned beside other things, or alone, and that are no loss.
        further: metrics, behind the loss that a call returned.
        beside_another: that measure what another one measures.
        metrics: of batches that train.
        unreduced: not one number, but one for each row.
    """

    taken: int = 0
    sums: int = 0
    several: int = 0
    aside: int = 0
    alone: int = 0
    numbers: int = 0
    rows: int = 0
    further: int = 0
    beside_another: int = 0
    metrics: int = 0
    unreduced: int = 0

    def notes(self, passes: int) -> list[str]:
        """What an evaluation's mean has, or lacks, that nobody would think of; over so many `passes` at most."""
        notes = []
        if self.aside:
            notes.append(
                f"{_losses(self.aside)} computed without gradients of models that do not train (an averaged copy, "
                "say); eval_loss leaves them out."
            )
        if self.alone:
            notes.append(
                f"{self.alone} losses of models that do not train (an averaged copy, say) are eval_loss where no "
                "others were computed without gradients."
            )
        if self.numbers:
            notes.append(
                f"{self.numbers} numbers that a model's call without gradients returned beside other things are not "
                "the whole of what backward was called on; eval_loss leaves them out."
            )
        if self.rows:
            notes.append(
                f"{self.rows} numbers that a model's call without gradients returned are not what backward was called "
                "on (what it predicts for one row, say); eval_loss leaves them out."
            )
        if self.further:
            notes.append(
                f"{_losses(self.further)} computed without gradients when a model's call had returned the one that "
                "the program trains by (a metric, say); eval_loss leaves them out."
            )
        if self.beside_another:
            notes.append(
                f"{_losses(self.beside_another)} computed without gradients of the same tensors as another one (a "
                "metric, say); eval_loss has the one that the program trains by, or else the first."
            )
        if self.metrics:
            notes.append(
                f"{_losses(self.metrics)} computed without gradients of batches that train (a metric, say); "
                "eval_loss leaves them out."
            )
        if self.unreduced:
            notes.append(
                f'{self.unreduced} losses of evaluations were computed with reduction="none", a number for each row '
                "or element; eval_loss has none of them."
            )
        if self.sums:
            notes.append(
                f'{self.sums} of {self.taken} losses of evaluations were computed with reduction="sum": eval_loss is '
                "the mean of such sums over a batch, before the program divides them, and no measure beside a training "
                "loss that is a mean."
            )
        if self.several:
            notes.append(
                f"{_losses(self.several)} computed without gradients of what another one had been computed of (of "
                "several tasks, say); eval_loss is the mean of them all, whatever the program makes of them."
            )
        if passes > 1:
            notes.append(
                f"Evaluations took up to {passes} passes over data loaders between two steps: eval_loss is "
                "the mean over all of them."
            )
        return notes


def _losses(count: int) -> str:
    return "1 loss was" if count == 1 else f"{count} losses were"
