"""The child process of a run:  python -m narrowgauge.session.process.boot PLAN.json

Sets the seeds, opens the run, attaches a session, runs the program as `__main__` exactly as Python would, and records
how it ended. The program's own exit code is this process's exit code; 2 means that narrowgauge could not do what was
asked.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch

from narrowgauge.compute.recipes import ROLES, by_name
from narrowgauge.errors import NarrowgaugeError, ScriptError
from narrowgauge.observe.store import RunWriter
from narrowgauge.session.attach import Session, StopTraining
from narrowgauge.session.machine import machine_facts
from narrowgauge.session.plan import Plan
from narrowgauge.session.process.command import Program, parse
from narrowgauge.session.same_weights import SameWeightsProbe

PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def seed_everything(seed: int) -> dict[str, int]:
    """Seed torch, numpy and random alike (the parent set PYTHONHASHSEED); returns what was set, for the metadata."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    hash_seed = os.environ.get("PYTHONHASHSEED", "random")
    return {"torch": seed, "numpy": seed, "random": seed, "hash": int(hash_seed) if hash_seed.isdigit() else -1}


def die_with_parent() -> None:
    """A comparison that is killed must not leave its run training on by itself (Linux; elsewhere it does)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def execute(program: Program) -> None:
    """Run the program as `python` would have: its own sys.argv, sys.path[0] and `__main__`."""
    if program.is_module:
        sys.argv = [program.target, *program.args]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(program.target, run_name="__main__", alter_sys=True)
    else:
        sys.argv = [program.target, *program.args]
        sys.path.insert(0, str(Path(program.target).resolve().parent))
        runpy.run_path(program.target, run_name="__main__")


def own_frames(error: BaseException) -> str:
    """The traceback as the program's author would have seen it, without narrowgauge's frames above the program."""
    frames = traceback.extract_tb(error.__traceback__)
    first = 0
    for number, frame in enumerate(frames):
        if frame.filename.startswith("<frozen runpy") or frame.filename.endswith("runpy.py"):
            first = number + 1
    shown = ["Traceback (most recent call last):\n", *traceback.format_list(frames[first:])] if frames[first:] else []
    return "".join([*shown, *traceback.format_exception_only(error)])


def run_plan(plan: Plan) -> int:
    """Do what the plan says in this process; returns the exit code."""
    began = time.perf_counter()
    program = parse(plan.command)
    seeds = seed_everything(plan.seed)
    meta: dict[str, Any] = {
        "command": program.line(),
        "variant": plan.variant,
        "recipe": plan.recipe,
        "formats": {role: by_name(plan.recipe).uses(role)[0].fmt.name for role in ROLES} if plan.recipe else {},
        "baseline": plan.baseline,
        "noise": plan.noise,
        "seeds": seeds,
        **machine_facts(),
    }
    writer = RunWriter(plan.folder, meta)
    probe = None
    if plan.probe:
        recipes = {name: by_name(name) for name in plan.probe}
        probe = SameWeightsProbe(recipes, plan.probe_steps, plan.convert)
    session = Session(plan, writer, probe)
    code, error, refused = 0, "", False
    try:
        execute(program)
    except StopTraining:
        session.notes.append(f"The script was ended after {session.ledger.steps} optimizer steps, as --steps asked.")
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if stop.code is not None and not isinstance(stop.code, int):
            print(stop.code, file=sys.stderr)
        error = f"the script called sys.exit({stop.code!r})" if code else ""
    except KeyboardInterrupt:
        code, error = 130, "interrupted"
    except NarrowgaugeError as refusal:
        code, error, refused = 2, str(refusal), True
        print(f"narrowgauge: {refusal}", file=sys.stderr)
    except BaseException as raised:
        code, error = 1, "".join(traceback.format_exception_only(raised)).strip()
        sys.stderr.write(own_frames(raised))
    if not code and plan.steps and session.ledger.steps < plan.steps:
        made = f"The script ended by itself after {session.ledger.steps} optimizer steps"
        session.notes.append(f"{made}: --steps {plan.steps} can only end one earlier.")
    try:
        session.finish()
        facts = session.facts()
        if not code and (error := nothing_to_judge(facts, converting=bool(plan.recipe or plan.rehearse))):
            code, refused = 2, True
            print(f"narrowgauge: {error}", file=sys.stderr)
    except Exception as raised:  # whatever was recorded is kept
        facts = {"notes": [f"closing the run failed: {raised!r}"]}
    seconds = time.perf_counter() - began
    writer.update_meta(**facts, exit_code=code, error=error, refused=refused, seconds=seconds)
    writer.close("failed" if code else "complete")
    sys.stdout.flush()
    return code


def nothing_to_judge(facts: dict[str, Any], *, converting: bool) -> str:
    """Why a program that ended well has no step, or nothing in FP8, and what to do about it; "" if it has."""
    if facts["steps"] and (not converting or facts["models"]):
        return str(facts["refusal"])
    if not facts["optimizers"]:
        what = "it made no torch.optim optimizer"
        hint = "give the script that trains, with arguments that make it train"
    elif not facts["models"]:
        what = "no torch.nn.Module with parameters of its optimizer was called with gradients on"
        hint = "call the model itself (model(x)), not a function on its parameters"
    elif not facts["backwards"]:
        what = "backward() was never called"
        hint = "give arguments that make it train for at least a few steps"
    else:
        what = "its optimizer never stepped"
        hint = "give arguments that make it train for at least a few steps"
    which = "with nothing to convert" if facts["steps"] else "without a training step"
    return str(ScriptError(f"the script ended {which}: {what}; {hint}."))


def main() -> None:
    """Entry of the child process."""
    die_with_parent()
    if len(sys.argv) != 2:
        print("narrowgauge.session.process.boot is started by narrowgauge itself, with a plan.", file=sys.stderr)
        raise SystemExit(2)
    plan = Plan.read(Path(sys.argv[1]))
    try:
        code = run_plan(plan)
    except NarrowgaugeError as refusal:
        print(f"narrowgauge: {refusal}", file=sys.stderr)
        code = 2
    raise SystemExit(code)


if __name__ == "__main__":
    main()
