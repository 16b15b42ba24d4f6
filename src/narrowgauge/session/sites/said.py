"""What a run's notes say of tensors that were shown: which were passed over, what failed, what compiling hides."""

from __future__ import annotations

from collections.abc import Callable

from narrowgauge.errors import in_one_line, let_pass

NO_FLOAT64 = "Training in BF16 or FP8 holds no float64"
CLOSED = (
    "What was compiled before the watch began is not seen inside, its steps are. Call torch.compile after ng.watch to "
    "see its layers."
)
CONVERTED = (
    "Products outside of known layers are not recorded inside of what the program compiles: converted layers are "
    "watched in its graphs."
)
UNTOLD = (
    "Products outside of known layers are not recorded: the program compiles, and this torch does not tell when what "
    "it compiled is called."
)
AT_ONCE = (
    "What is compiled ran in one thread while another was recorded: products outside of known layers may be missing."
)


class Said:
    """Sentences, each once.

    Args:
        told: is told what failed.
    """

    def __init__(self, told: Callable[[str], None] = lambda what: None) -> None:
        self._told = told
        self._notes: dict[str, None] = {}
        self._kinds: set[str] = set()  # of what no quantizer takes: a role, and what kind of tensor

    @property
    def notes(self) -> list[str]:
        """All that was said, in order."""
        return [*self._notes]

    @property
    def passed_over(self) -> list[str]:
        """One sentence of what no quantizer takes; none if nothing came that none does."""
        if not self._kinds:
            return []
        kinds = ", ".join(sorted(self._kinds))
        why = f" {NO_FLOAT64}." if "float64" in kinds else ""
        return [f"Some operands of layers are not recorded, because no quantizer takes them: {kinds}.{why}"]

    @property
    def unrecorded(self) -> str:
        """The same where nothing else came at all; "" if nothing was passed over."""
        if not self._kinds:
            return ""
        kinds = ", ".join(sorted({kind.partition(" ")[2] for kind in self._kinds}))
        instead = f" {NO_FLOAT64}: watch the program in float32, BF16 or FP16." if "float64" in kinds else ""
        return f"No tensor was recorded: no quantizer takes what the layers multiply ({kinds}).{instead}"

    def say(self, note: str) -> None:
        """Leave a note."""
        self._notes.setdefault(note)

    def pass_over(self, kind: str) -> None:
        """An operand is not recorded: its role, and what it is."""
        self._kinds.add(kind)

    def failed(self, what: str, error: Exception) -> None:
        """Leave a note of an error; of several, the first says enough."""
        let_pass(error)
        cause = in_one_line(error)
        self._told(f"watching {what} failed: {cause}")
        if not any(note.startswith("Watching ") for note in self._notes):
            self.say(f"Watching {what} failed, and its numbers are missing: {cause}. Training goes on.")
