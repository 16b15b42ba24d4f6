"""The reference page of the settings, written from the tables so that it cannot lag behind them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from narrowgauge.session.config.load import inner_table
from narrowgauge.session.config.tables import Config
from narrowgauge.session.dumps.choice import size

EXAMPLE = """\
seed = 1234

[watch]
every = 20                       # record tensors every 20 steps ...
steps = ["0-100", 250, "1000-"]  # ... in these ranges, and in step 250
sites = ["blocks.*", "!blocks.0.*"]
skip = ["*:weight"]
metrics = ["amax", "*sqnr_db", "underflow_pct"]

[convert]                        # of --convert, and of what compare converts
skip = ["lm_head"]
last = 2

[[high]]                         # the gradient of the weights of these layers stays out of FP8
sites = ["*.down"]
gemms = ["wgrad"]

[[dump]]                         # what was quantized, and what it became, whole
sites = ["blocks.3.mlp.down"]
steps = "100-102"
cap = "2 GiB"

[export]
tensorboard = true
"""
_OPENING = f"""\
# Settings: narrowgauge.toml

*Generated from `narrowgauge.session.config`; edit the tables there, not this page.*

Settings that are too many for flags lie in a file, given with `--config narrowgauge.toml` to `run` and to
`compare`; none is read that was not given, and they say so where one lies beside them. Flags go before it. Every key
may be left out.

```toml
{EXAMPLE}```

A file with a mistake is refused before anything runs, each mistake with its line and the nearest thing that there is:

```text
narrowgauge.toml:4: watch.evry: there is no such key; did you mean 'every'?
narrowgauge.toml:7: watch.roles[1]: there is no role 'wieght'; did you mean 'weight'?
```

**Sites** are `module:role`. A glob without a role takes all roles of a module; `*` crosses dots, and a name covers
everything below it: `blocks.3` is the whole block. `!` in front leaves out; a list of these alone leaves out of
everything. An empty list that would choose everything is a mistake. Which modules and
metrics a program has is known only when it runs: what matched nothing is told on stderr when it ends, and stands in
the run's notes (of metrics a name that no site has, and globs of which none matched), as does a `[convert]` without
`--convert`. A glob of `[convert]` or `[[high]]` that matches nothing ends the program before its first step.

**Steps** are counted from 1; a range may begin with 0. It takes both its ends. Of a range those steps are recorded
that `every` divides; a step that is named alone is recorded whatever `every` says. Dumps are of every step of their
ranges.
"""
_AFTER = {
    "watch": """\
What is not selected is not computed: a layer of which nothing is selected is not looked at, a tensor of a plain
layer that is not selected is not quantized. Metrics are made together from one look, so `metrics` saves what is
stored and not what is computed. `what_if` is for `run` ([which steps and products](run.md#fp8-readiness));
`compare` measures its recipes at the same weights instead.
""",
    "high": """\
Tables add up. What stays high is bit by bit the unconverted layer's product; the other products are bit by bit
those of the converted layer. Where only an operand stays high, the other is quantized, and what its codes stand for
is multiplied in the layer's own dtype. A layer with a switch saves x and w for its backward pass as an unconverted
layer does, and is one operator each way under `torch.compile`. In Python: `ng.convert(model, "current",
high=[{"sites": ["*.down"], "gemms": ["wgrad"]}])`.

**Layers that the program has converted itself**, by `ng.convert`, are switched from the model's first call to the end
of the watch, as `high=` would have switched them; run.json says which (`switched`). Of those that stay high whole no
operand is recorded. Under `--convert` there are none: it refuses a model that is converted already.

**torchao's layers** are switched by torchao's own configuration, with `--convert` or without it: the casts of a
product that stays high are disabled before the model first runs, and `run.json` says of which (`switched`). An
operand alone (`roles`) or `bf16_gemm` it cannot do, and says so.

**TransformerEngine's layers** (`Linear`, `LayerNormLinear`, `LayerNormMLP`, `GroupedLinear`) are switched by its own
means, from the model's first call to the end of the watch, and not by its debug mode:

| what stays high | how | of which layers |
|---|---|---|
| all products | the layer is called outside of the program's autocast; a step costs what it costs in BF16 | all four |
| some, operands, `bf16_gemm` | its quantizers are joined anew, by `HybridQuantizer` (2.20) | all but `LayerNormMLP` |

Scales, amax histories and checkpoints stay the program's. What is not possible ends the program before its first step,
with the reason: single products of `LayerNormMLP`, and of experts in one grouped kernel (`use_grouped_tensor`); high
weights where FP8 ones are the only ones (`quantized_model_init`), of which `wgrad` alone can stay high; products that
overlap with communication. A layer that never ran in FP8, or whose recipe keeps its backward high already
(`backward_override`), is told when the program ends.

Three things to know. Codes that are multiplied high (`bf16_gemm`, or beside an operand in `roles`) are those by rows,
also where a recipe's blocks lie otherwise by columns. A layer that norms inside rounds the normed input to BF16 first
if its input stays high in a product, so that its other products may differ by a rounding. Under `torch.compile` the
graph breaks at switched layers, which `fullgraph=True` refuses; what was captured as a CUDA graph before the watch
began is not switched, nor is a copy of the model that is made meanwhile.

What is not converted at all has nothing to switch; tables that meet only such layers are told when the program ends.
""",
    "dump": """\
A step is one safetensors file per rank, `dumps/step00000100-rank0.safetensors` in the run's folder: of each site
`SITE.x`, what was quantized, `SITE.codes` and `SITE.scale`; of later microbatches `SITE@1.x` and so on, of a weight
the first. `narrowgauge inspect` says what such a file is and measures it. On a GPU copies go to pinned memory and a
thread writes them, so training waits only when the last step's file is not written yet; run.json says what that
cost (`watch.dumps`). When the cap is reached nothing more of that table is written, and the run says so. A file is
written under another name and then renamed.
""",
    "export": "More in [export.md](export.md).\n",
}


def render() -> str:
    """The whole of docs/config.md."""
    parts = [_OPENING, "\n## At the top\n\n", *_rows(Config, "")]
    for name, field in Config.model_fields.items():
        table = inner_table(field.annotation)
        if table is None:
            continue
        title = f"[[{name}]]" if get_origin(field.annotation) is list else f"[{name}]"
        parts += [f"\n## {title}\n\n{table.__doc__}\n\n", *_rows(table, "")]
        if name in _AFTER:
            parts.append(f"\n{_AFTER[name]}")
    return "".join(parts)


def _rows(table: type[BaseModel], prefix: str) -> Iterator[str]:
    if not prefix:
        yield "| key | value | without it | |\n|---|---|---|---|\n"
    for name, field in table.model_fields.items():
        below = inner_table(field.annotation)
        if below is not None and table is Config:
            continue
        default = "must be given" if field.is_required() else _plain(name, field.default)
        kind = "`true`, or a table" if below is not None else _kind(field)
        yield f"| `{prefix}{name}` | {kind} | {default} | {' '.join((field.description or '').split())} |\n"
        if below is not None:
            yield from _rows(below, f"{name}.")


def _plain(name: str, default: Any) -> str:
    if default is None or default == []:
        return ""
    text = size(default) if name == "cap" else str(default).lower() if isinstance(default, bool) else str(default)
    return "`" + text.replace("'", '"') + "`"


def _kind(field: FieldInfo) -> str:
    return _word(field.annotation)


def _word(annotation: Any) -> str:
    if annotation is bool:
        return "`true` or `false`"
    inner = [part for part in get_args(annotation) if part is not type(None)]
    if get_origin(annotation) is list:
        return "list"
    if inner and all(isinstance(part, str) for part in inner):
        return " or ".join(f'`"{part}"`' for part in inner)
    if len(inner) == 1 or hasattr(annotation, "__metadata__"):
        return _word(inner[0])
    return {int: "whole number", str: "text"}.get(annotation, "size")
