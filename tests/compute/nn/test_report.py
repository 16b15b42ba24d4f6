"""The conversion report: coverage, live calls, its table and its JSON."""

import io
import json
from types import SimpleNamespace

from rich.console import Console

from narrowgauge.compute.nn.conversion.report import ConversionReport, Row


def report():
    rows = []
    for block in range(3):
        for name, shape in (("attn.qkv", (192, 64)), ("mlp.down", (64, 256))):
            high = (block, name) == (2, "mlp.down")
            rows.append(
                Row(
                    f"layers.{block}.{name}",
                    shape,
                    None if high else "current",
                    "skip='layers.2.mlp.down'" if high else "O2: every linear not kept high",
                    None if high else "reference",
                    state=None if high else SimpleNamespace(calls=0),
                )
            )
    rows.append(Row("lm_head", (96, 64), None, "output head: its name says so ('lm_head')", shared_with=("embed",)))
    return ConversionReport("Gpt", "current", tuple(rows), (("current", "reference", "emulated: no FP8"),))


def test_coverage_is_the_flop_share():
    total = 6 * (3 * 192 * 64 + 3 * 64 * 256 + 96 * 64)
    assert report().coverage == (total - 6 * (64 * 256 + 96 * 64)) / total
    assert ConversionReport("Empty", "current", ()).coverage == 0.0


def test_calls_are_live_and_name_what_never_ran():
    now = report()
    assert len(now.never_called()) == 5
    for row in now.converted[:4]:
        row.state.calls += 2
    assert now.never_called() == ("layers.2.attn.qkv",)
    assert now.rows[0].calls == 2
    assert now.rows[-1].calls is None
    assert "converted and never called: layers.2.attn.qkv" in now.table()


def test_the_table_is_aligned_and_folds_equal_blocks():
    assert str(report()) == report().table() == TABLE
    shown = []
    report()._repr_pretty_(SimpleNamespace(text=shown.append), cycle=False)  # as IPython asks
    assert shown == [TABLE]
    assert len(report().table(full=True).splitlines()) == len(TABLE.splitlines()) + 3


TABLE = """\
Gpt: 5 of 7 linear layers in FP8, 75.6% of the linear FLOPs
current runs on reference: emulated: no FP8

layer                    out x in  FLOPs  runs in  calls  why
-----------------------  --------  -----  -------  -----  ---
layers.0-2.attn.qkv (3)  192 x 64  40.0%  current      0  O2: every linear not kept high
layers.0-1.mlp.down (2)  64 x 256  35.6%  current      0  O2: every linear not kept high
layers.2.mlp.down        64 x 256  17.8%  high            skip='layers.2.mlp.down'
lm_head                   96 x 64   6.7%  high            output head: its name says so ('lm_head'); \
weight shared with embed"""


def test_rich_prints_it_verbatim():
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(report())
    assert console.export_text().rstrip() == TABLE


def test_it_survives_json():
    data = json.loads(json.dumps(report().to_dict()))
    assert data["converted"] == 5
    assert data["coverage"] == report().coverage
    assert data["backends"] == [{"recipe": "current", "backend": "reference", "reason": "emulated: no FP8"}]
    assert data["rows"][-1] == {
        "name": "lm_head",
        "shape": [96, 64],
        "recipe": None,
        "reason": "output head: its name says so ('lm_head')",
        "backend": None,
        "flops_per_token": 6 * 96 * 64,
        "fp8_gemms": 0,
        "calls": None,
        "aliases": [],
        "shared_with": ["embed"],
        "block": None,
        "blocks": 0,
    }
