"""The tables of `narrowgauge.toml`, one class each; docs/config.md is generated from them.

seed = 1234
[watch]      which steps, sites, roles and metrics are recorded; by which recipes plain layers are judged
[convert]    which layers go to FP8
[[high]]     which gemms and operands of converted layers stay high
[[dump]]     which tensors are written out whole
[export]     where else the run's numbers go while it runs
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from narrowgauge.errors import RecipeError
from narrowgauge.metrics import CATALOG
from narrowgauge.metrics.site import ROLES
from narrowgauge.session.config.words import (
    WILD,
    BackendName,
    GemmName,
    Glob,
    MetricGlob,
    Natural,
    OperandRole,
    Positive,
    RecipeName,
    Role,
    SiteGlob,
    Size,
    Some,
    Spans,
    wrong,
)

# Of the catalog, from simple to fine; by name, because whoever launches a run has no need of torch.
STATELESS = ("current", "rowwise", "blockwise", "mxfp8", "mxfp8-ocp")


def _switch(value: Any) -> Any:
    """`true` is the table with its defaults, `false` is none."""
    return {} if value is True else None if value is False else value


class Table(BaseModel):
    """One table: no key that is not known, no value of another type, nothing that changes afterwards."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)

    def given(self) -> dict[str, Any]:
        """What the file says of this table, as plain data."""
        return self.model_dump(exclude_unset=True, mode="json")


class Watch(Table):
    """What is recorded, and when. A site is recorded if every key that is given selects it."""

    every: Positive = 10
    """Record tensors every so many steps; `--every` goes before it."""
    steps: Annotated[Spans, Some] = []
    """Record only in these steps: a range such as `"0-100"` or `"500-"`, a step, or a list of them."""
    sites: Annotated[list[SiteGlob], Some] = []
    """Globs on module names, or on `module:role`. A name covers everything below it; `!` in front leaves out."""
    skip: list[SiteGlob] = []
    """The same globs: what they match is left out."""
    roles: Annotated[list[Role], Some] = []
    """Which parts: operands (`input`, `weight`, `grad_output`), results (`output`, `grad_input`, `grad_weight`)."""
    metrics: Annotated[list[MetricGlob], Some] = []
    """Names or globs of metrics; the others are not stored."""
    what_if: list[RecipeName] | None = None
    """Recipes that tell what they would do: the first without state to layers that nobody converted, as the run's own
    rows; the others to every recorded operand, below `what_if/` in the run's folder. None if empty: then layers that
    nobody converted have neither rows nor dumps. Without it, `current` gives the rows, and all others without state
    are asked in few of the recorded steps; in a converted run its own recipe does, if it has no state, and none is
    asked."""
    compiled: Literal["auto", "graphs", "uncompiled"] = "auto"
    """How a recorded step runs what the program compiled: `uncompiled`; in `graphs` that torch compiles for recorded
    steps; `auto` is uncompiled until that has lost as much time as compiling took."""
    scalars: Literal["auto", "all", "loss", "recorded"] = "auto"
    """What a step's row of scalars has (loss, norms, rates, tokens): `all` of it in each step; where none is recorded
    only the `loss`, the learning rates and the time; or, in a program of one process, no row of these at all, but of
    the steps before and behind a recorded one (`recorded`). `auto`: `loss` while steps are shorter than 0.1 s on all
    ranks (of more than 400 parameters, as many times that), else `all`. `compare` has all."""
    ranks: bool = False
    """Store each rank's own rows, beside those of all ranks together."""

    @model_validator(mode="after")
    def _possible(self) -> Watch:
        roles = self.roles or list(ROLES)
        for place, name in enumerate(self.metrics):
            if not set(name).intersection(WILD) and not set(CATALOG[name].roles).intersection(roles):
                has = f"it is for {', '.join(CATALOG[name].roles)}"
                raise wrong(f"no {' or '.join(roles)} has the metric {name!r}; {has}", "metrics", place)
        return self


class Convert(Table):
    """Which layers `--convert` and `compare` take to FP8."""

    skip: list[Glob] = []
    """Globs on module names: these layers stay high. A name covers everything below it."""
    only: list[Glob] | None = None
    """Globs on module names: only these layers are converted."""
    first: Natural = 0
    """So many repeated blocks stay high at the input end."""
    last: Natural = 0
    """So many at the output end."""
    backend: BackendName | None = None
    """The kernels' backend; without it the best one that can."""
    skip_slow: bool = False
    """Layers that FP8 was measured to slow down on this GPU stay high."""
    tokens: Positive | None = None
    """Rows of input at which `skip_slow` judges."""
    reduce_amax: bool = True
    """Ranks that train a layer together make delayed scales from the largest amax of all; else each from its own."""

    @model_validator(mode="after")
    def _possible(self) -> Convert:
        if self.tokens is not None and not self.skip_slow:
            why = "is only used by skip_slow; add skip_slow = true, or leave it out"
            raise wrong(f"{self.tokens} {why}", "tokens")
        return self


class High(Table):
    """One switch for layers in FP8, also torchao's and TransformerEngine's: what it names is not multiplied in FP8."""

    sites: Annotated[list[Glob], Some] = ["*"]
    """Globs on the names of linear layers. A name covers everything below it; `!` in front leaves out."""
    gemms: Annotated[list[GemmName], Some] = ["fprop", "dgrad", "wgrad"]
    """Which products: `fprop`, `dgrad`, `wgrad`."""
    roles: list[OperandRole] = []
    """Which operands of them stay high; without it, both do. The product then runs in the layer's own dtype."""
    keep: Literal["high", "bf16_gemm"] = "high"
    """`high`: not quantized. `bf16_gemm`: quantized, but multiplied in the layer's own dtype."""

    @model_validator(mode="after")
    def _possible(self) -> High:
        from narrowgauge.compute.recipes.switched import check  # torch loads here, for those who switch

        high = self.keep == "high"
        for place, role in enumerate(self.roles):
            try:
                check(self.gemms, [role] if high else self.roles, self.keep)
            except RecipeError as error:
                raise wrong(str(error), *(("roles", place) if high else ("keep",))) from None
        return self


class Dump(Table):
    """One choice of operands that are written to `dumps/` in the run's folder, whole."""

    sites: Annotated[list[SiteGlob], Some]
    """Globs on module names, or on `module:role`. A name covers everything below it; `!` in front leaves out."""
    steps: Annotated[Spans, Some]
    """In these steps: a range such as `"0-2"`, a step, or a list of them."""
    roles: Annotated[list[OperandRole], Some] = ["input", "weight", "grad_output"]
    """Which operands."""
    cap: Size = Field(default=1 << 30, validate_default=True)
    """The most that one process writes for this table, as bytes or with a unit such as `"2 GiB"`."""


class TensorBoard(Table):
    """Files for TensorBoard."""

    dir: str | None = None
    """Their folder; without it, one in the run's folder."""


class Wandb(Table):
    """A run of Weights & Biases."""

    project: str | None = None
    """The project."""
    name: str | None = None
    """The run's name there."""
    mode: Literal["online", "offline", "disabled"] | None = None
    """As in `wandb.init`."""


class Mlflow(Table):
    """A run of MLflow."""

    uri: str | None = None
    """The tracking server."""
    experiment: str | None = None
    """The experiment."""


class Prometheus(Table):
    """Gauges in the OpenMetrics format."""

    port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Serve them on this port."""
    file: str | None = None
    """Write them to this file, for a collector that reads files."""


class Export(Table):
    """Where else a run's numbers go while it runs. Each is `true`, or a table of its own."""

    tensorboard: Annotated[TensorBoard | None, BeforeValidator(_switch)] = None
    """TensorBoard."""
    wandb: Annotated[Wandb | None, BeforeValidator(_switch)] = None
    """Weights & Biases."""
    mlflow: Annotated[Mlflow | None, BeforeValidator(_switch)] = None
    """MLflow."""
    prometheus: Annotated[Prometheus | None, BeforeValidator(_switch)] = None
    """Prometheus, or whatever reads OpenMetrics."""
    sites: list[SiteGlob] = []
    """Globs: only these sites' metrics go out, beside those of the whole run."""

    @model_validator(mode="after")
    def _possible(self) -> Export:
        if self.model_fields_set == {"sites"} and self.sites:
            why = "it chooses of what is exported, and nothing is; add tensorboard = true, say, or leave it out"
            raise wrong(why, "sites")
        return self


class Config(Table):
    """The settings of one run or comparison."""

    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] = 1234  # TOML promises no larger numbers, torch takes none
    """What `compare` seeds every run with."""
    watch: Watch = Watch()
    convert: Convert = Convert()
    high: list[High] = []
    dump: list[Dump] = []
    export: Export = Export()

    def for_watching(self, recipe: str | None = None) -> dict[str, Any]:
        """`for_plan`, and who judges the tensors of a program that is watched, converted to `recipe` or not at all."""
        asked = self.watch.what_if
        if asked is None:
            judge, *others = STATELESS
            if recipe:  # what stays high is put through the same, if it keeps no state
                judge, others = recipe if recipe in STATELESS else judge, []
            return {**self.for_plan(), "judge": judge, "what_if": tuple(others), "seldom": True}
        judge = _judge_of(asked)
        chosen = tuple(name for name in dict.fromkeys(asked) if name not in (judge, recipe))
        return {**self.for_plan(), "judge": judge, "what_if": chosen}

    def for_plan(self) -> dict[str, Any]:
        """The fields of a `Plan` that this file decides, as plain data."""
        data = self.model_dump(mode="json")
        export = {name: value for name, value in data["export"].items() if value is not None}
        return {
            "seed": self.seed,
            "every": self.watch.every,
            "convert": self.convert.given() | ({"high": data["high"]} if data["high"] else {}),
            "watch": data["watch"],
            "dump": tuple(data["dump"]),
            "export": export if len(export) > 1 else {},
        }


def _judge_of(names: list[str]) -> str:
    if names[:1] == ["current"]:  # no need of torch
        return "current"
    from narrowgauge.session.what_if import judge_of

    return judge_of(names)
