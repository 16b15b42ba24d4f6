"""`[[high]]` reaches the layers of a watched program, and its report."""

from tests.session import programs
from tests.session.test_attach import follow


def test_products_that_stay_high_are_in_the_runs_conversion(tmp_path):
    high = [{"sites": ["0"], "gemms": ["wgrad"], "roles": [], "keep": "high"}]
    session, writer = follow(tmp_path, programs.BASIC, every=8, recipe="current", convert={"high": high})
    rows = {row["name"]: row["reason"] for row in session.facts()["conversion"]}
    assert rows["0"].endswith("; wgrad high")
    assert "; " not in rows["2"]
    summary = session.facts()["conversion_summary"][0]
    assert any("1 converted layers keep a product or an operand high" in note for note in summary["notes"])
    whole = follow(tmp_path, programs.BASIC, every=8, recipe="current")[1]
    assert writer.column("loss")[1] == whole.column("loss")[1]  # the first forward is the same
    assert writer.column("loss")[8] != whole.column("loss")[8]


def test_a_table_all_of_whose_layers_stay_high_anyway_is_told(tmp_path):
    """docs/config.md says so of each table; it was told only where no table met a layer."""
    whole = {"gemms": ["fprop", "dgrad", "wgrad"], "roles": [], "keep": "high"}
    high = [{"sites": ["2"], **whole}, {"sites": ["0"], **whole}, {"sites": ["*"], **whole, "gemms": ["wgrad"]}]
    convert = {"high": high, "skip": ["0"]}
    session, _ = follow(tmp_path, programs.BASIC, every=8, recipe="current", convert=convert)
    assert {row["name"]: row["recipe"] for row in session.facts()["conversion"]} == {
        "0": None,
        "2": None,
        "4": "current",
    }
    assert session.facts()["unmet"] == [
        "high[1]: none of the layers that it names is in FP8, so there was nothing to switch."
    ]
