"""The public names of every package are pinned: adding or dropping one is a decision, made here."""

import importlib
import pkgutil
import typing

import pytest

import narrowgauge as ng

TOP = """
Block PerColumn PerRow PerTensor convert errors formats load_scaling_state measure open_run quantize recipes revert
rules scaling_state watch
"""
# package -> its public names; every package that has any is here
PINNED = {
    "formats": "CATALOG E2M1 E4M3FN E4M3FNUZ E5M2 E5M2FNUZ E8M0 Format Specials by_name decode encode round_to",
    "metrics": """
        CATALOG COLUMNS HISTOGRAMS MOMENTS OPERAND_COLUMNS OPERAND_ROLES RESULT_COLUMNS RESULT_ROLES ROLES Layout
        Metric Site Slot by_name exponent_of_bin finalize merge
    """,
    "compute.quant": """
        BLOCK_128x128 BLOCK_1x128 BLOCK_1x32 Block CURRENT CURRENT_POW2 E8M0_OCP E8M0_UP Granularity PerColumn
        PerRow PerTensor QTensor ROWWISE ROWWISE_POW2 Scaling decode e8m0_bytes format_of inv_scale_from_amax
        quantize torch_dtype
    """,
    "compute.recipes": """
        BLOCKWISE CATALOG CURRENT DELAYED MXFP8 MXFP8_OCP ROLES ROWWISE STATIC Gemm Operand Recipe by_name fake
    """,
    "compute.kernels": "BACKENDS Backend Both Given Reference ScaledMM choose",
    "compute.nn": """
        ConversionReport Fp8Linear GemmSample O1 O2 Observer Rule StepClock clock_of convert load_scaling_state
        revert scaling_state set_observer
    """,
    "observe.store": "Compaction Run RunWriter SCHEMA Table compact open_run role_of",
    "observe.export": "Event Exporter Look Point Summary check",
    "observe.inspect": "Inspection inspect open_checkpoint page plain",
    "observe.stats": "Collector measure merge moments",
    "observe.verdict": """
        Answer Evidence Outcome SameWeights TwinFacts VariantVerdict Verdict WorstTensor judge
    """,
    "observe.figures": """
        DARK HeatMetric METRICS Trace exponent_histogram gradient_errors heatmap loss_curves loss_gap scale_steps
        scale_traces shared_steps variant_colors
    """,
    "observe.report": "html lines plain render text write_report",
    "session.config": "Config load",
    "session.dumps": "Dumper",
    "session.shortcut": "Shortcut",
    "session.sites": "Census KINDS Kind Own Part Products kind_of",
    "session.ranks": "Ranks Told",
    "session.same_weights": "RecipeVariant SameWeightsProbe Variant snapshot_steps",
}


def packages():
    walked = pkgutil.walk_packages(ng.__path__, "narrowgauge.")
    return [module.name for module in walked if module.ispkg]


def test_the_top_level_names():
    assert ng.__all__ == TOP.split()
    assert set(ng.__all__) == set(ng._LAZY)
    assert set(ng.__all__) <= set(dir(ng))


@pytest.mark.parametrize("name", TOP.split())
def test_every_lazy_name_resolves_to_what_it_says(name):
    value = getattr(ng, name)
    module, attribute = ng._LAZY[name]
    expected = importlib.import_module(module)
    assert value is (getattr(expected, attribute) if attribute else expected)


def test_an_unknown_name_names_the_nearest():
    with pytest.raises(AttributeError, match=r"^narrowgauge has no 'quantise'; did you mean 'quantize'\?$"):
        _ = ng.quantise


@pytest.mark.parametrize("name", packages())
def test_the_names_of_every_package_are_pinned(name):
    module = importlib.import_module(name)
    public = sorted(getattr(module, "__all__", []))
    assert public == sorted(PINNED.get(name.removeprefix("narrowgauge."), "").split())
    assert [word for word in public if not hasattr(module, word)] == []


def test_every_pinned_package_exists():
    assert {f"narrowgauge.{name}" for name in PINNED} <= set(packages())


@pytest.mark.parametrize("name", PINNED)
def test_public_classes_and_functions_are_documented(name):
    module = importlib.import_module(f"narrowgauge.{name}")
    values = {word: getattr(module, word) for word in module.__all__}
    made_here = {
        word: value
        for word, value in values.items()
        if callable(value) and not typing.get_origin(value) and type(value).__module__ in {"builtins", "abc", "typing"}
    }
    assert [word for word, value in made_here.items() if not (value.__doc__ or "").strip()] == []
