"""How a process ended, in words."""

from __future__ import annotations

import signal


def describe_code(code: int) -> str:
    """An exit code in words.

    >>> describe_code(-9)
    'killed by SIGKILL (often: out of memory)'
    """
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name if -code in {s.value for s in signal.Signals} else f"signal {-code}"
    return f"killed by {name}" + (" (often: out of memory)" if -code == signal.SIGKILL else "")
