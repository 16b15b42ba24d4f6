"""What torch.compile made a module with: a program may compile more by it, as the module's methods.

Lightning's Trainer takes a compiled module apart: `module.dynamo_ctx(model.training_step)` stands in the place of the
method, and the compiled module itself is never called.

Source: torch, `torch._dynamo.eval_frame.OptimizedModule`; Lightning, `lightning.pytorch.utilities.compile`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Follow = Callable[[Any, Callable[..., Any]], Callable[..., Any]]


class Context:
    """The same in each other respect; a copy of it, or what it is pickled as, is torch's own.

    Args:
        context: torch's, which compiles a function that it is called with.
        follow: makes of the function, and of what that was compiled to, what is to be called.
    """

    def __init__(self, context: Any, follow: Follow) -> None:
        self._context, self._follow = context, follow

    def __call__(self, function: Any) -> Any:
        """Compile a function, and have what comes of it followed."""
        return self._follow(function, self._context(function))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return itself, (self._context,)


def itself(context: Any) -> Any:
    """The same."""
    return context
