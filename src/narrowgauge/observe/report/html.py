"""One self-contained HTML file: the verdict first, then the evidence. Opens offline, fetches nothing.

    html(verdict, runs, out)          a comparison: runs "baseline", "noise" and one per variant
    html(None, {"run": run}, out)     a single run, without a verdict

All text reaches the page through Jinja with autoescape on, all data through JSON whose "<" is escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from narrowgauge.errors import RunError
from narrowgauge.observe.figures import DARK, METRICS, variant_colors
from narrowgauge.observe.report import (
    conversion,
    facts,
    gather,
    headline,
    pictures,
    readiness,
    ruler,
    single,
    summary,
    words,
)
from narrowgauge.observe.report.further import further
from narrowgauge.observe.report.layout import Pictures, bokeh_js
from narrowgauge.observe.store import Run
from narrowgauge.observe.verdict.began import began
from narrowgauge.observe.verdict.converted import converted
from narrowgauge.observe.verdict.high import stays_high
from narrowgauge.observe.verdict.types import VariantVerdict, Verdict, WorstTensor
from narrowgauge.observe.verdict.worst import worst_tensors

ROLE = "grad_output"  # shown first: gradients are where FP8 goes wrong first
WORST_HIGH = 3  # tensors of layers that stayed high


@dataclass(frozen=True)
class Inside:
    """What the page shows of one FP8 run under its selector."""

    name: str
    place: str  # safe in an HTML id
    worst: tuple[pictures.Tensor, ...]
    conversion: tuple[conversion.Line, ...]
    judged_by: str  # the recipe that tensors were only put through; "" where nothing was
    converted: bool  # only those of layers that stayed high were, then
    high: tuple[WorstTensor, ...] = ()  # the worst of these, by that recipe


def html(verdict: Verdict | None, runs: Mapping[str, Run], out: Path) -> Path:
    """Write the report and return its path.

    `runs` by name in the order of the page; names of a comparison are those of the verdict. Missing pieces (no
    tensors, no evaluation, a run that died) are said in the page.
    Errors: RunError when there is neither run nor verdict, or `out` cannot be written.
    """
    if not runs and verdict is None:
        raise RunError("There is no run to report on; expected at least one run folder.")
    page = render(verdict, runs)
    out = Path(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(page, encoding="utf-8")
    except OSError as error:
        raise RunError(f"{out} cannot be written ({error.strerror}). Choose another file with -o.") from error
    return out


def render(verdict: Verdict | None, runs: Mapping[str, Run]) -> str:
    """The page as text."""
    names = list(dict.fromkeys([*runs, *_named(verdict)]))
    colors = variant_colors(names)
    drawn = Pictures()
    pictures.losses(drawn, runs, colors, verdict)
    if verdict:
        pictures.same_weights(drawn, verdict, colors)
    inside_runs = {name: run for name, run in runs.items() if run.meta.get("recipe") or run.metrics}
    judged = {v.name: v for v in verdict.variants} if verdict else {}
    worst = {n: judged[n].worst if n in judged else worst_tensors(run) for n, run in inside_runs.items()}
    rows = {n: (judged[n].conversion if n in judged else ()) or converted(run.metas) for n, run in inside_runs.items()}
    order = [str(row.get("name")) for each in rows.values() for row in each]
    layers = gather.layers(inside_runs, order)
    opened = _opened([n for n in inside_runs if n in layers.variants] or list(inside_runs), judged)
    of_opened = layers.roles(opened)
    role = ROLE if ROLE in of_opened else next(iter(of_opened), ROLE)
    pictures.inside(drawn, layers, colors, worst, f"{opened}|{role}")
    inside = [
        Inside(
            n,
            f"v{i}",
            pictures.worst_tensors(drawn, f"v{i}", run, worst[n], colors[n]),
            conversion.lines(rows[n]),
            str(run.meta.get("judged_by") or ""),
            bool(run.meta.get("recipe") or rows[n]),
            worst_tensors(run, WORST_HIGH, of=stays_high(run.metas)),
        )
        for i, (n, run) in enumerate(inside_runs.items())
    ]
    alone = None if verdict else single.single(runs)
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            v=verdict,
            headline=headline.headline(verdict) if verdict else [],
            speed=headline.speed_line(verdict) if verdict and verdict.judged else "",
            summary=summary.summary(verdict) if verdict else None,
            outcomes=headline.OUTCOMES,
            answers=headline.ANSWERS,
            ruler={v.name: Markup(ruler.svg(v)) for v in verdict.variants} if verdict else {},
            colors={name: f"var(--c{color[1:]})" for name, color in colors.items()},
            hues=[(f"--c{color[1:]}", color, DARK[color]) for color in sorted(set(colors.values()))],
            runs=[facts.run_facts(name, run) for name, run in runs.items()],
            breath=facts.breath(runs),
            began=[] if verdict else [(name, began(run)) for name, run in runs.items()],
            single=alone,
            single_lines=single.lines(alone or []),
            readiness=[(n, found) for n, run in runs.items() if (found := readiness.readiness(run)) is not None],
            db=readiness.db,
            when=readiness.when,
            in_short=readiness.in_short,
            facts=facts.common_facts(runs, verdict),
            notes=facts.notes_of(runs, verdict.notes if verdict else ()) + _further(runs),
            events=_events(runs),
            pictures=drawn,
            inside=inside,
            opened=opened,
            layers=layers,
            roles=layers.roles(),
            role=role,
            metrics=METRICS,
            title=_title(verdict, runs),
            bokeh_js=Markup(bokeh_js()),
            data=Markup(drawn.to_json()),
        )
    )


def _further(runs: Mapping[str, Run]) -> list[str]:
    """What lies inside of these runs' folders and is on no page of theirs."""
    told = {name: said for name, run in runs.items() if (said := further(run.path))}
    return [f"{name}: {said}" if len(runs) > 1 else said for name, said in told.items()]


def _named(verdict: Verdict | None) -> list[str]:
    """Every run that a verdict speaks of, whether or not it left anything."""
    if verdict is None:
        return []
    return [run.name for run in (verdict.baseline, verdict.noise, *verdict.variants) if run is not None]


def _opened(names: Sequence[str], judged: Mapping[str, VariantVerdict]) -> str:
    """The run that the selector opens on: the one in the worst trouble, or the first."""
    trouble = ("fail", "watch", "inconclusive")
    rank = {n: trouble.index(judged[n].outcome) if n in judged and judged[n].outcome in trouble else 9 for n in names}
    return min(names, key=lambda n: rank[n], default="")


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("narrowgauge.observe.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        percent=words.percent,
        unsigned=lambda x: words.percent(x, signed=False),
        loss=words.loss,
        cosine=words.cosine,
        number=words.number,
        seconds=words.seconds,
        scrub=words.scrub,
        moment=facts.moment,
    )
    return environment


def _title(verdict: Verdict | None, runs: Mapping[str, Run]) -> str:
    if verdict:
        return "narrowgauge · " + "".join(text for text, _ in headline.headline(verdict))
    return f"narrowgauge · {words.listing(list(runs))}"


def _events(runs: Mapping[str, Run], most: int = 12) -> list[dict[str, Any]]:
    """What happened, per run and kind: how often, first step, first message."""
    rows: list[dict[str, Any]] = []
    for name, run in runs.items():
        table = run.events()
        seen: dict[tuple[str, str], dict[str, Any]] = {}
        for i in range(table.rows):
            event = table.row(i)
            key = (str(event["kind"]), str(event["site"] or ""))
            if key not in seen:
                seen[key] = {
                    "run": name,
                    "kind": key[0],
                    "site": key[1],
                    "step": int(event["step"]),
                    "count": 0,
                    "message": words.scrub(str(event["message"] or "")),
                }
            seen[key]["count"] += 1
        rows += seen.values()
    rows.sort(key=lambda row: row["step"])
    return rows[:most]
