"""A site is a tensor's address: which module, and which part the tensor plays in it.

    site = "module:role"                for example "layers.3.w2:grad_output"

Three roles are quantized operands, three are results of the gemms that multiply them:

    fprop   input x weight            -> output
    dgrad   grad_output x weight      -> grad_input
    wgrad   grad_output x input       -> grad_weight
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase

from narrowgauge.errors import UsageError, nearest

OPERAND_ROLES = ("input", "weight", "grad_output")
RESULT_ROLES = ("output", "grad_input", "grad_weight")
ROLES = OPERAND_ROLES + RESULT_ROLES
WHOLE = "(model)"  # the name of a model that is one layer


@dataclass(frozen=True, order=True)
class Site:
    """A tensor's address. `str(site)` is `module:role`, and `Site.parse` is its inverse.

    Args:
        module: the module's dotted name in its model; "" for the model itself.
        role: one of `ROLES`.

    Raises:
        UsageError: the role does not exist.
    """

    module: str
    role: str

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise UsageError(f"there is no role {self.role!r}; {nearest(self.role, ROLES)}")

    def __str__(self) -> str:
        return f"{self.module}:{self.role}"

    @property
    def is_operand(self) -> bool:
        """Whether the tensor is quantized (else it is a gemm's result)."""
        return self.role in OPERAND_ROLES

    @classmethod
    def parse(cls, text: str) -> Site:
        """The site that `text` names.

        >>> Site.parse("layers.3.w2:grad_output").role
        'grad_output'

        Raises:
            UsageError: `text` is not `module:role`.
        """
        module, colon, role = text.rpartition(":")
        if not colon:
            raise UsageError(
                f"{text!r} is not a site; write module:role, for example layers.0.w2:input (roles: {', '.join(ROLES)})"
            )
        return cls(module, role)


def covers_name(glob: str, name: str) -> bool:
    """Whether a glob matches a dotted name or a prefix of it that ends at a dot, or is one of these as it stands.

    >>> covers_name("tower.*", "tower.head[0]"), covers_name("tower.head[0]", "tower.head[0]")
    (True, True)
    """
    parts = name.split(".")
    heads = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
    return glob in heads or any(fnmatchcase(head, glob) for head in heads)


def natural(name: str) -> list[tuple[int, str | int]]:
    """Sort key under which layers.2 comes before layers.10."""
    return [(1, int(part)) if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]
