"""Settings files: what they may say, and what a wrong one is told."""

import pytest

from narrowgauge.errors import UsageError
from narrowgauge.session.config import Config, load
from narrowgauge.session.plan import Plan

WHOLE = """
seed = 7
[watch]
every = 2
steps = ["0-100", 200, "500-"]
sites = ["blocks.*", "!blocks.0"]
skip = ["*:weight"]
roles = ["input", "weight"]
metrics = ["amax", "*sqnr*"]
what_if = ["current", "blockwise"]
compiled = "graphs"
scalars = "recorded"
ranks = true
[convert]
skip = ["lm_head"]
last = 2
skip_slow = true
tokens = 4096
[[high]]
sites = ["blocks.0"]
gemms = ["wgrad"]
[[high]]
keep = "bf16_gemm"
[[dump]]
sites = ["blocks.0:input"]
steps = "0-2"
cap = "2 GiB"
[export]
tensorboard = true
wandb = {project = "p", mode = "offline"}
mlflow = false
sites = ["blocks.0"]
"""


def write(tmp_path, text):
    path = tmp_path / "narrowgauge.toml"
    path.write_text(text)
    return path


def refused(tmp_path, text):
    """What is said of a file, without the file's own path."""
    path = write(tmp_path, text)
    with pytest.raises(UsageError) as raised:
        load(path)
    return str(raised.value).replace(str(path), "FILE")


def test_no_file_is_the_defaults():
    assert load(None) == Config()
    assert load(None).for_plan()["every"] == 10
    assert load(None).for_plan()["export"] == {}


def test_everything_is_read_and_travels_in_a_plan(tmp_path):
    plan = Plan("a", str(tmp_path / "out"), ("t.py",), **load(write(tmp_path, WHOLE)).for_plan())
    assert (plan.seed, plan.every) == (7, 2)
    high = [
        {"sites": ["blocks.0"], "gemms": ["wgrad"], "roles": [], "keep": "high"},
        {"sites": ["*"], "gemms": ["fprop", "dgrad", "wgrad"], "roles": [], "keep": "bf16_gemm"},
    ]
    kept = {"skip": ["lm_head"], "last": 2, "skip_slow": True, "tokens": 4096, "high": high}
    assert plan.convert == kept
    assert plan.watch == {
        "every": 2,
        "steps": [[0, 100], [200, 200], [500, None]],
        "sites": ["blocks.*", "!blocks.0"],
        "skip": ["*:weight"],
        "roles": ["input", "weight"],
        "metrics": ["amax", "*sqnr*"],
        "what_if": ["current", "blockwise"],
        "compiled": "graphs",
        "scalars": "recorded",
        "ranks": True,
    }
    roles = ["input", "weight", "grad_output"]
    assert plan.dump == ({"sites": ["blocks.0:input"], "steps": [[0, 2]], "roles": roles, "cap": 2 << 30},)
    assert plan.export == {
        "tensorboard": {"dir": None},
        "wandb": {"project": "p", "name": None, "mode": "offline"},
        "sites": ["blocks.0"],
    }
    assert Plan.read(plan.write()) == plan


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("sead = 1", "FILE:1: sead: there is no such key; did you mean 'seed'?"),
        ("\n[convert]\nlats = 1", "FILE:3: convert.lats: there is no such key; did you mean 'last'?"),
        (
            "[[dump]]\nsites = ['a']\nsteps = 1\nrols = []",
            "FILE:4: dump[0].rols: there is no such key; did you mean 'r",
        ),
        ("[wacth]\nevery = 1", "FILE:1: wacth: there is no such key; did you mean 'watch'?"),
        ("[watch]\nevery = 0", "FILE:2: watch.every is 0; expected greater than or equal to 1."),
        ("[watch]\nevery = true", "FILE:2: watch.every is true; expected a whole number."),
        ("[watch]\nevery = '5'", "FILE:2: watch.every is '5'; expected a whole number."),
        ("watch = 3", "FILE:1: watch is 3; expected a table: [watch]."),
        ("[watch]\nranks = 1", "FILE:2: watch.ranks is 1; expected true or false."),
        (
            "[watch]\nroles = [\n 'input',\n 'wieght']",
            "FILE:2: watch.roles[1]: there is no role 'wieght'; did you mean",
        ),
        (
            "[watch]\nmetrics = ['sqnr']",
            "FILE:2: watch.metrics[0]: no metric is called 'sqnr'; did you mean 'sqnr_db'?",
        ),
        ("[watch]\nmetrics = ['foo*']", "FILE:2: watch.metrics[0]: no metric is called 'foo*'; there are: amax,"),
        (
            "[watch]\nroles = ['output']\nmetrics = ['scale_max']",
            "FILE:3: watch.metrics[0]: no output has the metric 'scale_max'; it is for input, weight, grad_output.",
        ),
        ("[watch]\nwhat_if = ['curent']", "FILE:2: watch.what_if[0]: no recipe is called 'curent'; did you mean 'curr"),
        ("[watch]\nsites = ['']", "FILE:2: watch.sites[0]: '' matches nothing; expected a glob on module names, or m"),
        ("[watch]\nsites = ['a:grad']", "FILE:2: watch.sites[0]: 'a:grad' ends in no role; did you mean 'grad_"),
        ("[watch]\nsites = 'a'", "FILE:2: watch.sites is 'a'; expected a list: [\"a\"]."),
        ("[watch]\nsites = {}", "FILE:2: watch.sites is {}; expected a list."),
        ("[watch]\nsites = [3]", "FILE:2: watch.sites[0] is 3; expected a text in quotes."),
        ("seed = 1979-05-27", "FILE:1: seed is 1979-05-27; expected a whole number."),
        ("[watch]\nsteps = '9-5'", "FILE:2: watch.steps[0]: '9-5' ends before it begins; expected \"5-9\"."),
        ("[watch]\nsteps = ['1', 'x']", 'FILE:2: watch.steps[1]: \'x\' is no range of steps; expected "7", "0-100" or'),
        ("[watch]\nsteps = -3", "FILE:2: watch.steps[0]: -3 is no range of steps"),
        ("[watch]\nsteps = ['1', 0]", "FILE:2: watch.steps[1]: 0 has no step: they are counted from 1."),
        ("[[dump]]\nsites = ['a']\nsteps = '0-0'", "FILE:3: dump[0].steps[0]: '0-0' has no step"),
        ("[watch]\nsteps = true", "FILE:2: watch.steps[0]: true is no range of steps"),
        ("[watch]\nsteps = [2020-01-01]", "FILE:2: watch.steps[0]: 2020-01-01 is no range of steps"),
        ("seed = [true, 2020-01-01]", "FILE:1: seed is [true, 2020-01-01]; expected a whole number."),
        ("[convert]\nbackend = 'fuse'", "FILE:2: convert.backend: no backend is called 'fuse'; did you mean 'fused'?"),
        ("[convert]\nskip = 'x'", "FILE:2: convert.skip is 'x'; expected a list: [\"x\"]."),
        ("[convert]\nfirst = -1", "FILE:2: convert.first is -1; expected greater than or equal to 0."),
        ("[convert]\ntokens = 8", "FILE:2: convert.tokens: 8 is only used by skip_slow; add skip_slow = true"),
        ("[[high]]\nkeep = 'bf16'", "FILE:2: high[0].keep is 'bf16'; expected 'high' or 'bf16_gemm'."),
        (
            "[[high]]\n[[high]]\ngemms = ['fwd']",
            "FILE:3: high[1].gemms[0]: there is no gemm 'fwd'; there are: dgrad, fprop, wgrad.",
        ),
        ("[[high]]\nroles = ['output']", "FILE:2: high[0].roles[0]: there is no operand 'output'; did you mean"),
        ("[[high]]\nroles = ['input']\nkeep = 'bf16_gemm'", "FILE:3: high[0].keep: keep='bf16_gemm' quantizes both"),
        (
            "[[high]]\ngemms = ['dgrad']\nroles = ['weight', 'input']",
            "FILE:3: high[0].roles[1]: 'input' is no operand of dgrad; its operands are grad_output and weight.",
        ),
        (
            "[[high]]\nroles = ['input']\ngemms = ['dgrad']",
            "FILE:2: high[0].roles[0]: 'input' is no operand of dgrad; its operands are grad_output and weight.",
        ),
        ("[high]\ngemms = []", "FILE:1: high is {gemms = []}; expected a list of tables: [[high]]."),
        ("[[dump]]\nsteps = 1", "FILE:1: dump[0].sites: it must be given. Globs on module names"),
        ("[[dump]]\nsites = ['a']", "FILE:1: dump[0].steps: it must be given. In these steps"),
        ("[[dump]]\nsites = ['a']\nsteps = 1\ncap = '2 XB'", "FILE:4: dump[0].cap is '2 XB'; expected bytes, or a n"),
        (
            "[[dump]]\nsites = ['a']\nsteps = 1\ncap = 1.5",
            "FILE:4: dump[0].cap is 1.5; expected bytes, or a number with",
        ),
        ("[[dump]]\nsites = []\nsteps = 1", "FILE:2: dump[0].sites: an empty list chooses nothing; name at least one"),
        ("[[dump]]\nsites = ['a']\nsteps = []", "FILE:3: dump[0].steps: an empty list chooses nothing"),
        ("[[dump]]\nsites = ['a']\nsteps = 1\nroles = []", "FILE:4: dump[0].roles: an empty list chooses nothing"),
        ("[watch]\nsteps = []", "FILE:2: watch.steps: an empty list chooses nothing"),
        ("[watch]\nsites = []", "FILE:2: watch.sites: an empty list chooses nothing"),
        ("[watch]\nroles = []", "FILE:2: watch.roles: an empty list chooses nothing"),
        ("[watch]\nmetrics = []", "FILE:2: watch.metrics: an empty list chooses nothing"),
        ("[[high]]\nsites = []", "FILE:2: high[0].sites: an empty list chooses nothing"),
        ("[[high]]\ngemms = []", "FILE:2: high[0].gemms: an empty list chooses nothing"),
        (
            "[[dump]]\nsites = ['a']\nsteps = 1\ncap = 0",
            "FILE:4: dump[0].cap is 0; expected greater than or equal to 1",
        ),
        ("[export]\nwandb = 3", "FILE:2: export.wandb is 3; expected a table: [export.wandb]."),
        ("[export]\nprometheus = {\n port = 99999}", "FILE is not valid TOML: Invalid initial character"),
        ("[export.prometheus]\nport = 99999", "FILE:2: export.prometheus.port is 99999; expected less than or equal"),
        (
            "[export.wandb]\nmode = 'of'",
            "FILE:2: export.wandb.mode is 'of'; expected 'online', 'offline' or 'disabled'",
        ),
        ("export.tensorboard.dri = 'a'", "FILE:1: export.tensorboard.dri: there is no such key; did you mean 'dir'?"),
        (f"seed = {'[' * 9999}", "FILE nests too deep; expected tables with keys."),
        ("seed = ", "FILE is not valid TOML: Invalid value (at"),
        (f"seed = 1{'0' * 5000}", "FILE is not valid TOML: a number in it has too many digits."),
        (f"seed = {2**63}", f"FILE:1: seed is {2**63}; expected less than {2**63}."),
        (f"seed = {-(2**63) - 1}", f"FILE:1: seed is {-(2**63) - 1}; expected greater than or equal to {-(2**63)}."),
        ("dump = [1]", "FILE:1: dump[0] is 1; expected a table: [[dump]]."),
        ("[export]\nsites = ['a']", "FILE:2: export.sites: it chooses of what is exported, and nothing is; add tenso"),
    ],
)
def test_wrong_files_are_told_why(tmp_path, text, says):
    assert refused(tmp_path, text).startswith(says)


def test_every_mistake_is_told_with_its_own_line(tmp_path):
    said = refused(tmp_path, "sead = 1\n\n[watch]\nevery = 0\nranks = 'yes'\n")
    assert [line.split(" ")[0] for line in said.splitlines()] == ["FILE:1:", "FILE:4:", "FILE:5:"]


def test_a_missing_file(tmp_path):
    with pytest.raises(UsageError, match="cannot read the configuration"):
        load(tmp_path / "none.toml")


def test_a_file_that_is_no_text(tmp_path):
    path = tmp_path / "narrowgauge.toml"
    path.write_bytes(b"seed = 1 # \xff")
    with pytest.raises(UsageError, match="it is not UTF-8"):
        load(path)


def test_a_mark_at_the_beginning_is_no_mistake_and_lines_are_counted_as_ever(tmp_path):
    path = tmp_path / "narrowgauge.toml"
    path.write_bytes(b"\xef\xbb\xbf[watch]\r\nevery = 3\r\n")
    assert load(path).watch.every == 3
    path.write_bytes(b"\xef\xbb\xbf[watch]\r\nevry = 3\r\n")
    with pytest.raises(UsageError, match=r"toml:2: watch\.evry"):
        load(path)
