"""Real programs run twice, by hand and watched, and what the two say of the same tensors."""

import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from tests.integrations.differences import TOLERANCES, differences, finished, of_stages, together
from tests.ports import free_port

import narrowgauge
from narrowgauge.observe.store import open_run

HERE = Path(__file__).parent
PROGRAMS = HERE / "programs"
BY_HAND = str(HERE / "by_hand.py")
RANKS = str(HERE / "ranks.py")
BIN = Path(sys.executable).parent
NARROWGAUGE = [sys.executable, "-c", "from narrowgauge.cli.main import main; main()"]
ROLES = ("input", "weight", "grad_output")
OF_RECORDED = ("param_norm", "update_ratio")  # scalars; others are of all steps
OPTIONS = ("--out", "out")
DEVICE = os.environ.get("TEST_DEVICE", "cpu")  # "cuda": the programs train on GPUs, one for each rank
OURS = Path(narrowgauge.__file__).parents[1]
# A GPU's kernels sum on tensor cores, within 3e-6 of float64 (docs/looks.md).
NEAR = TOLERANCES | ({} if DEVICE == "cpu" else {"amax": 3e-6, "std": 3e-5, "cosine": 5e-6})


def environment(folder, **more):
    """A user's environment, without a network and with our source first."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("NARROWGAUGE", "PYTEST"))}
    return {
        **kept,
        "PATH": os.pathsep.join([str(BIN), kept["PATH"]]),
        "PYTHONPATH": str(OURS),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "hf"),
        "TOKENIZERS_PARALLELISM": "false",
        **({"CUDA_VISIBLE_DEVICES": ""} if torch.cuda.is_available() and DEVICE == "cpu" else {}),
        "DEVICE": DEVICE,
        **more,
    }


@dataclass(frozen=True)
class Ended:
    """One execution: how it ended, and what the script wrote down."""

    code: int
    out: str
    err: str
    said: dict  # what the script itself logged, from its rank 0


def execute(folder, words, run, **env):
    """Run `words` in `folder`, whose script writes `said.json`."""
    folder.mkdir()
    done = run(words, cwd=folder, env=environment(folder, **env))
    said = folder / "said.json"
    return Ended(done.returncode, done.stdout, done.stderr, json.loads(said.read_text()) if said.exists() else {})


def alone(words, cwd, env):
    """A process as anyone would start it."""
    return subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)


class Case:
    """A program of `programs/` under its launcher: by hand, watched at every step, or each EVERY-th, and converted."""

    def __init__(self, folder, name, launcher=("python",), ranks=1, warm=None, works=None, **env):
        if DEVICE == "cuda" and ranks > torch.cuda.device_count():
            pytest.skip("needs a GPU for each rank")
        gpus = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(ranks)))} if DEVICE == "cuda" else {}
        self.folder, self.ranks, self._env = folder, ranks, gpus | env
        self.every = int(env.get("EVERY", "1"))
        self._options = [*OPTIONS, "--every", str(self.every)]
        self._warm = warm if DEVICE == "cpu" else None  # a fork has no GPU
        self._words = list(launcher)
        for program in (name, "text", "attention", "slow_data"):
            source = PROGRAMS / f"{program}.py"
            if source.exists():
                shutil.copy(source, folder)
        self._script = str(folder / f"{name}.py")
        self.works = works
        if works:
            unsaid = works.unsaid(" ".join([*launcher, *env.values(), (PROGRAMS / f"{name}.py").read_text()]))
            assert not unsaid, f"what is launched has no {unsaid}"

    def _launcher(self, really=False):
        """Its words, "PORT" being a new one each time; if not `really`, of forks where that will do."""
        words = self._words
        if not really and (self._warm is not None or words == ["python"]):
            words = ["python", RANKS, str(self.ranks), "PORT"] if self.ranks > 1 else ["python"]
        return [str(free_port()) if word == "PORT" else word for word in words]

    def alone(self, **env):
        """Unwatched, as it is."""
        words, run = [*self._launcher(), self._script], self._warm.run if self._warm else alone
        return execute(self.folder / "alone", words, run, **self._env, **env)

    def by_hand(self, **env):
        """Unwatched, its tensors measured by hand."""
        words, run = [*self._launcher(), BY_HAND], self._warm.run if self._warm else alone
        return execute(self.folder / "plain", words, run, SCRIPT=self._script, **self._env, **env)

    def watched(self, *options, really=True, name="watched", **env):
        """Under `narrowgauge run`; `really`, as anyone would start it."""
        words = ["run", *self._options, *options, "--", *self._launcher(really), self._script]
        if really or self._warm is None:
            return execute(self.folder / name, [*NARROWGAUGE, *words], alone, **self._env, **env)
        return execute(self.folder / name, words, self._warm.narrowgauge, **self._env, **env)

    def converted(self, *options, name="converted", hand=True, **env):
        """Converted, its tensors measured by hand as well; it need not be started as anyone would."""
        script = BY_HAND if hand else self._script
        words = ["run", *self._options, "--convert", "current", *options, "--", *self._launcher(), script]
        folder, env = self.folder / name, {"SCRIPT": self._script, **self._env, **env}
        if self._warm is None:
            return execute(folder, [*NARROWGAUGE, *words], alone, **env)
        return execute(folder, words, self._warm.narrowgauge, **env)

    def run(self, name="watched", recipe=""):
        """The run that it left, or the one below it of what another recipe would do."""
        return open_run(self.folder.joinpath(name, "out", *(["what_if", recipe] if recipe else [])))

    def each_by_hand(self, name="plain", recipe="current"):
        """rank -> (step, site) -> statistics of what that rank multiplied, as this recipe would quantize it."""
        found = {rank: self._hand(rank, name)["rows"][recipe] for rank in range(self.ranks)}
        return {rank: {(row.pop("step"), row.pop("site")): row for row in rows} for rank, rows in found.items()}

    def rows_by_hand(self, name="plain", recipe="current"):
        """(step, site) -> statistics, the ranks' together."""
        ranks = list(self.each_by_hand(name, recipe).values())
        keys = {key for rows in ranks for key in rows}
        return {key: finished(together([rows[key] for rows in ranks if key in rows])) for key in keys}

    def losses_by_hand(self, name="plain"):
        """rank -> step -> sum of what backward was called on."""
        found = {rank: self._hand(rank, name)["losses"] for rank in range(self.ranks)}
        return {rank: {int(step): loss for step, loss in losses.items()} for rank, losses in found.items()}

    def scalars_by_hand(self, name="plain"):
        """rank -> step -> the rate, the norm of all gradients before they were clipped, and the tokens that it read."""
        found = {rank: self._hand(rank, name)["scalars"] for rank in range(self.ranks)}
        return {
            rank: {int(step): self._told(int(step), row) for step, row in rows.items()} for rank, rows in found.items()
        }

    def _told(self, step, row):
        return row if step % self.every == 0 else row | dict.fromkeys(OF_RECORDED, math.nan)

    def waits(self, name="watched"):
        """rank -> what the program wrote down of how long it waited for its data (programs/slow_data.py)."""
        return {rank: json.loads((self.folder / name / f"waits{rank}.json").read_text()) for rank in range(self.ranks)}

    def _hand(self, rank, name):
        return json.loads((self.folder / name / "hand" / f"rank{rank}.json").read_text())

    def rows(self, name="watched", ranks=(), recipe=""):
        """(step, site) -> statistics, from the run: of all ranks as one, or of as many as have parts of each."""
        table = self.run(name, recipe).tensors()
        columns = {column: table[column].tolist() for column in ("step", "site", *TOLERANCES, "exponent_histogram")}
        assert set(table["rank"].tolist()) == {0}
        assert self.ranks == 1 or set(table["ranks"].tolist()) == set(ranks or [self.ranks])
        if self.works:
            self.works.compares(self.run(name))
        keys = zip(columns["step"], columns["site"], strict=True)
        return {key: _row(columns, n) for n, key in enumerate(keys)}


def _row(columns, n):
    """The n-th row; `sampled` is how many elements the histogram has, whose bins are [0, 2^-96, 2^-95, ...]."""
    row = {column: columns[column][n] for column in TOLERANCES}
    counted = columns["exponent_histogram"][n]
    counted = [] if counted is None else counted  # a layer's results have none
    counts = {str(at - 97) if at else "zeros": int(count) for at, count in enumerate(counted) if count}
    return {**row, "sampled": sum(counts.values()), "binades": counts}


@dataclass(frozen=True)
class Seen:
    """A program's executions: by hand, watched, and converted if that is asked for."""

    case: Case
    plain: Ended
    watched: Ended
    converted: Ended | None

    @property
    def works(self):
        return self.case.works


def play(works, folders, name, launcher=("python",), warm=None, really=True, apart=False, options=(), hand=None, **env):
    """Execute a program in every way that `works` speaks of; skipped where its packages are missing.

    They can begin in a `warm` process, the watched one too, if it is not `really` started: one of each launcher is.
    What it says is that of an execution `apart` if measuring by hand moves its memory, and so the last place of sums.
    `options` are for the watched one alone, and `hand` is for the environment of the one by hand.
    """
    if reason := works.missing():
        pytest.skip(reason)
    case = Case(folders.mktemp(name), name, launcher, works.ranks, warm, works, **env)
    plain = case.by_hand(**(hand or {}))
    assert plain.code == 0, plain.err
    plain = replace(plain, said=case.alone().said) if apart else plain
    converted = case.converted() if works.converted else None
    return Seen(case, plain, case.watched(*options, really=really), converted)


def check_unharmed(seen, within=0.0):
    """What the program computes and logs is bit by bit what it is without us, and we say only where the run is.

    `within` is how near its numbers are where that cannot be so.
    """
    assert seen.watched.code == 0, seen.watched.err
    check_same(seen.watched.said, seen.plain.said, within)
    assert seen.watched.said
    ours = [line for line in seen.watched.err.splitlines() if "narrowgauge" in line and "/" not in line]
    assert ours == ["narrowgauge: the run is in out"]
    assert "Traceback" not in seen.watched.err
    run = seen.case.run()
    assert run.status == "complete"
    assert run.meta["error"] == ""
    found = run.scalars()
    losses = {step: loss for step, loss in zip(found["step"].tolist(), found["loss"].tolist(), strict=True) if step}
    ranks = list(seen.case.losses_by_hand().values())
    means = {step: sum(rank[step] for rank in ranks) / len(ranks) for step in ranks[0]}
    assert losses == pytest.approx(means, rel=max(within, 1e-6))


def check_same(found, want, within=0.0):
    """The same words, and numbers that are the same or this near, of what a program wrote down."""
    if isinstance(want, dict) and want.keys() == found.keys():
        for key in want:
            check_same(found[key], want[key], within)
    elif isinstance(want, list) and len(want) == len(found):
        for one, other in zip(found, want, strict=True):
            check_same(one, other, within)
    else:
        assert found == (pytest.approx(want, rel=within, abs=0.0) if isinstance(want, float) and within else want)


def check_logged(seen, logged, *, norm=True, within=1e-5, microbatches=2):
    """Loss, learning rate and gradient norm are those that rank 0 of the program logs itself, step by step."""
    found = seen.case.run().scalars()
    steps = seen.case.losses_by_hand()[0]
    assert [steps[step] for step in sorted(steps)] == pytest.approx([row["loss"] for row in logged], rel=within)
    assert found["lr"].tolist() == pytest.approx([row["learning_rate"] for row in logged], rel=1e-6)
    if norm:
        assert found["grad_norm"].tolist() == pytest.approx([row["grad_norm"] for row in logged], rel=1e-5)
    assert set(found["microbatches"].tolist()) == {microbatches}


def check_scalars(seen, *, same_data=False, stages=False, in_bf16=()):
    """Rate, norm and tokens of each step are those by hand.

    Ranks read `same_data` or each its own; or they are `stages`, the first of which reads. In the steps `in_bf16` the
    program rounds its norm to BF16.
    """
    found = seen.case.run().scalars()
    ranks = list(seen.case.scalars_by_hand().values())
    ranks = [{step: of_stages([rank[step] for rank in ranks]) for step in ranks[0]}] if stages else ranks
    steps = sorted(ranks[0])
    begun = sum(step == 0 for step in found["step"].tolist())  # by a validation before all steps
    assert found["step"].tolist()[begun:] == steps
    for name in ("lr", "grad_norm", "param_norm", "update_ratio"):
        near = 1e-3 if name == "update_ratio" else 1e-5  # a difference of float32 weights
        off = [2**-8 if name == "grad_norm" and step in in_bf16 else near for step in steps]
        want = [pytest.approx(ranks[0][step][name], rel=rel, nan_ok=True) for step, rel in zip(steps, off, strict=True)]
        assert found[name].tolist()[begun:] == want, name
    told = [sum(rank[step]["tokens"] for rank in (ranks[:1] if same_data else ranks)) for step in steps]
    assert found["tokens"].tolist()[begun:] == told


def check_waits(found, waits, *, slept=False):
    """No step waited longer for data than by the program's own clock around it, nor less than its samples `slept`."""
    assert len(found) == len(waits)
    assert all(0.0 < here <= step["waited"] for here, step in zip(found, waits, strict=True)), (found, waits)
    if slept:
        assert all(step["slept"] > 0.0 for step in waits), waits
        assert all(step["slept"] <= here for here, step in zip(found, waits, strict=True)), (found, waits)


def check_tensors(seen, want, ranks=()):
    """Every row of the run is there, and says what was computed by hand; `ranks` is as in `Case.rows`."""
    assert want
    found = differences(seen.case.rows(ranks=ranks), want, NEAR)
    assert not found, "\n".join(found[:8])


def check_converted(seen, *, named=lambda step, site: site, within=0.02, steps=None, ranks=()):
    """Its layers are in FP8 on every rank, tell what was computed of their tensors by hand, and still learn.

    `named` gives a site's name in the run; `within` is how near the losses are to those in the baseline's precision;
    `steps` are the steps there, if it made others, that they are compared with; `ranks` is as in `Case.rows`.
    """
    assert seen.converted.code == 0, seen.converted.err
    case = seen.case
    run = case.run("converted")
    assert (run.status, run.meta["error"]) == ("complete", "")
    rows = [row for meta in run.metas.values() for row in meta["conversion"]]  # stages have each its own
    converted = {row["name"] for row in rows if row["recipe"] == "current"}
    assert converted
    want = {(step, named(step, site)): row for (step, site), row in case.rows_by_hand("converted").items()}
    assert {f"{name}:{role}" for name in converted for role in ROLES} <= {site for _, site in want}
    found = case.rows("converted", ranks)
    assert differences({key: found[key] for key in found.keys() & want.keys()}, want, NEAR) == []
    assert run.events("replicas_disagree")["step"].tolist() == []
    converted, plain = (case.losses_by_hand(name)[0] for name in ("converted", "plain"))
    here, there = list(converted.values()), [plain[step] for step in steps or sorted(plain)]
    assert here == pytest.approx(there, rel=within)
    assert here != there
    assert here[-1] < here[0]


def check_refused(case, ended, said):
    """`--convert` found nothing to convert: the program was ended before its first step, and told why; no run is left.

    Of several ranks, each tells that comes to it before the launcher ends it.
    """
    assert (ended.code, ended.out, ended.said) == (1, "", {})
    told = [line for line in ended.err.splitlines() if line.startswith("narrowgauge: ")]
    why = f"narrowgauge: --convert: {said} The program was ended; without --convert it is watched as it is."
    nothing = "narrowgauge: nothing was trained, so there is no run; out can be used again"
    assert (set(told[:-1]), told[-1]) == ({why}, nothing)
    assert len(told) <= 1 + case.ranks
    assert DEVICE != "cpu" or "Traceback" not in ended.err  # there, torchrun tells by one that its children ended
    assert not (case.folder / "converted" / "out").exists()
