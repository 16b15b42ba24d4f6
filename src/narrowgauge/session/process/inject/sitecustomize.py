"""Imported by every Python that starts below `narrowgauge run`: waits for `import torch`, and arms the watch then.

Python imports one module of this name as it starts. So this one steps out of the way and imports the next, if there is
one. Nothing is written anywhere; what a child process inherits are two variables of its environment:

    PYTHONPATH         begins with this folder
    NARROWGAUGE_PLAN   what to do: a file in the run's folder

A Python that never imports torch pays for one comparison per import. A narrowgauge that cannot be imported here, or
fails, is told in one line, and the program runs on.

A program may start any Python there is, and Python 2 has to read all of this before it knows better: hence no words
that only a newer one has.
"""

import os
import sys

HAS_SPECS = (3, 4)
OURS = (3, 11)  # what narrowgauge itself asks for; an older one that imports torch is told so


class _BeforeTorch:
    """Finds no module, but sees the import of torch coming.

    A library that only asks whether torch is installed asks for the same spec and executes nothing: it is given one
    each time, and the watch goes on waiting.
    """

    asking = False

    def __init__(self, plan):  # type: ignore[no-untyped-def]
        self.plan = plan  # read now: the program may empty its environment before it imports torch

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        """torch's own spec, whose execution is followed by `_arm`; None for all other modules."""
        if name != "torch" or self.asking:
            return None
        import importlib.util

        self.asking = True
        try:
            spec = importlib.util.find_spec("torch")
        finally:
            self.asking = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def then_arm(module):  # type: ignore[no-untyped-def]
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                execute(module)
                _arm(self.plan)

            spec.loader.exec_module = then_arm  # type: ignore[method-assign]
        return spec


def _arm(plan):  # type: (str) -> None
    try:
        if sys.version_info < OURS:
            raise RuntimeError("this is Python {}.{}, and narrowgauge needs {}.{}".format(*sys.version_info[:2] + OURS))
        from narrowgauge.session.process.armed import arm

        arm(plan)
    except Exception as error:
        why = "{}: {}".format(type(error).__name__, error)  # noqa: UP032
        sys.stderr.write("narrowgauge: this process is not watched: " + why + "\n")


def _step_aside():  # type: () -> None
    """Leave the path, and import whatever module of this name would have been imported without us."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != here]
    mine = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:  # Python 2 does not say of what, and passes over whatever it is
        if getattr(error, "name", "") != "sitecustomize":
            raise
        if mine is not None:
            sys.modules["sitecustomize"] = mine


if "NARROWGAUGE_PLAN" in os.environ and sys.version_info >= HAS_SPECS:
    sys.meta_path.insert(0, _BeforeTorch(os.environ["NARROWGAUGE_PLAN"]))  # type: ignore[no-untyped-call]
if __name__ == "sitecustomize":
    _step_aside()
