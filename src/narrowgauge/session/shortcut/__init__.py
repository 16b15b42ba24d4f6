"""Steps that are left alone and are as the one before: told by nine functions instead of twenty-seven.

Between a program's own operations nothing of ours is in the processor's caches: each function, each object that it
looks at and each name that it looks up takes its part of a microsecond from memory. So while all is as usual
(`steps/usual.py`) one function or two stand where the ordinary ones do, and keep what they are told in one place. They
are closures over what they need: a local name is the nearest there is.

now.py         what they are told: the step that is made, as far as it is
call_hooks.py  around the model's call
looks.py       what that is given, of programs of which it is asked
backward.py    in the place of torch.autograd.backward
step_hooks.py  around the optimizer's step
shortcut.py    when they may stand there; how they come to their places, and leave them
"""

from narrowgauge.session.shortcut.shortcut import Shortcut

__all__ = ["Shortcut"]
