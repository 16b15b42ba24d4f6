"""What came before takes the shorter way, and leaves what the whole way does."""

import pytest
import torch
from safetensors import safe_open
from tests.session.inline import followed
from torch import nn

import narrowgauge as ng
from narrowgauge import open_run
from narrowgauge.observe.stats import Collector, host
from narrowgauge.session.recorder import Recorder

ROLES = ("input", "weight", "grad_output")


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 48), nn.Flatten(0, 1), nn.Linear(48, 8))


def train(model, batches):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, batch in enumerate(batches):
        for x in batch:
            with torch.autocast("cpu", torch.bfloat16, enabled=number % 3 == 2):
                model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def usual():
    """Eight steps of two microbatches."""
    return [[torch.randn(5, 16, 64) for _ in range(2)] for _ in range(8)]


def shapes():
    """The last batches of epochs are smaller."""
    return [[torch.randn(3 if number % 4 == 3 else 5, 16, 64)] for number in range(8)]


def not_finite():
    batches = usual()
    batches[4][1][0, 0, 0] = torch.inf
    batches[6][0][1, 2, 3] = torch.nan
    return batches


def with_gaps():
    """In some steps rows lie apart, or turned."""
    batches = usual()
    batches[3] = [torch.randn(5, 16, 128)[..., ::2], torch.randn(64, 5, 16).permute(1, 2, 0)]
    batches[5] = [torch.randn(5, 32, 64)[:, :16]]
    return batches


def negated():
    """A view whose numbers are the opposite of what lies in memory."""
    batches = usual()
    batches[4] = [torch._neg_view(torch.rand(5, 16, 64)) for _ in range(2)]
    return batches


def told(folder):
    """All rows of a run and of those below it, as words."""
    runs = [open_run(path).tensors() for path in (folder, *sorted(folder.glob("what_if/*")))]
    return [{name: repr(columns[name].tolist()) for name in columns if name != "time"} for columns in runs]


@pytest.mark.parametrize("settings", ["", '[watch]\nsites = ["2", "!2:weight"]', '[watch]\nwhat_if = ["rowwise"]'])
@pytest.mark.parametrize("batches", [usual, shapes, not_finite, with_gaps, negated], ids=lambda f: f.__name__)
def test_rows_are_the_same_by_either_way(batches, settings, tmp_path, monkeypatch):
    host.wait()
    config = tmp_path / "narrowgauge.toml"
    config.write_text(settings)
    asked = []
    judge = Collector.judge

    def counted(collector, *args):
        asked.append(args[:2])
        return judge(collector, *args)

    def rows(folder):
        asked.clear()
        torch.manual_seed(1)
        with ng.watch(model := net(), out=folder, every=1, config=config):
            train(model, batches())
        return told(folder), len(asked)

    monkeypatch.setattr(Collector, "judge", counted)
    short, few = rows(tmp_path / "short")
    monkeypatch.setattr(Recorder, "again", lambda *args, **own: None)
    long, many = rows(tmp_path / "long")
    assert len(short) == len(long) >= 1
    assert short == long
    # Of what comes in another shape or type than the time before, or is asked by other recipes, all go the whole way.
    assert few < many or batches is shapes or "what_if" in settings


def test_a_dump_is_of_tensors_that_would_take_the_shorter_way(tmp_path):
    host.wait()
    config = tmp_path / "narrowgauge.toml"
    config.write_text('[[dump]]\nsites = ["2:input"]\nsteps = ["5"]\n')
    with ng.watch(model := net(), out=tmp_path / "run", every=1, config=config):
        train(model, usual())
    (file,) = tmp_path.glob("run/dumps/*.safetensors")
    with safe_open(file, "pt") as dump:
        assert any(name.startswith("2:input") for name in dump.keys())  # noqa: SIM118
    assert len(open_run(tmp_path / "run").tensors()["site"]) == 8 * 9


def test_what_an_optimizer_tries_takes_no_way_at_all(tmp_path):
    host.wait()
    with followed(tmp_path, judge="current", every=1) as (session, writer):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for number in range(6):
            model(torch.randn(5, 16, 64)).square().mean().backward()
            if number > 3:
                tried = model(torch.full((5, 16, 64), 1e3)).square().mean()
                session.recorder.selection.paused = True
                tried.backward()
                session.recorder.selection.paused = False
            optimizer.step()
            optimizer.zero_grad()
    for step, sites, columns in writer.tensors:
        numel = dict(zip(sites, columns["numel"], strict=True))
        assert numel["0:grad_output"] == 80 * 32
        assert numel["0:input"] == (2 if step > 4 else 1) * 80 * 64


def test_an_error_of_ours_is_one_note_and_the_program_goes_on(tmp_path, monkeypatch):
    host.wait()
    with followed(tmp_path, judge="current", every=1) as (_, writer):
        model = net()
        train(model, usual()[:4])
        monkeypatch.setattr("narrowgauge.observe.stats.packing.Packer.add_counted", lambda *args: 1 / 0)
        train(model, usual()[:2])
    assert [kind for _, kind, _ in writer.events] == ["watch_failed"]
    assert "ZeroDivisionError" in writer.events[0][2]


def assert_the_same_by_either_way(rows, folder, monkeypatch):
    host.wait()
    short = rows(folder / "short")
    monkeypatch.setattr(Recorder, "again", lambda *args, **own: None)
    assert short == rows(folder / "long")


class Heads(nn.Linear):
    """Multiplies by itself, and gives its result as so many heads."""

    heads = 2

    def forward(self, x):
        return (x[:, None, :] * self.weight).sum(-1).view(-1, self.heads, self.out_features // self.heads)


def test_the_same_gradient_as_other_rows_is_counted_as_those(tmp_path, monkeypatch):
    def rows(folder):
        torch.manual_seed(1)
        layer = Heads(32, 16, bias=False)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        with ng.watch(layer, out=folder, every=1):
            for step in range(8):
                layer.heads = 2 if step < 4 else 4
                layer(torch.randn(24, 32)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return told(folder)

    assert_the_same_by_either_way(rows, tmp_path, monkeypatch)


def test_a_layer_s_own_rule_is_not_that_of_another_in_its_place(tmp_path, monkeypatch):
    torchao = pytest.importorskip("torchao.float8")

    def rows(folder):
        torch.manual_seed(1)
        config = torchao.Float8LinearConfig.from_recipe_name("rowwise")
        config = torchao.Float8LinearConfig(**{**vars(config), "emulate": True})
        model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 32))
        plain = nn.Linear(32, 32)
        torchao.convert_to_float8_training(model, config=config)
        with ng.watch(model, out=folder, every=1):
            for step in range(8):
                if step == 4:
                    model[1] = plain
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                model(torch.randn(48, 64)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return told(folder)

    assert_the_same_by_either_way(rows, tmp_path, monkeypatch)


class Quantizer:
    """As a layer of TransformerEngine holds them: it says of what format it makes codes, and how."""

    with_amax_reduction, force_pow_2_scales, amax_epsilon = False, False, 0.0

    def __init__(self, dtype):
        self.dtype = dtype


Quantizer.__name__ = "Float8CurrentScalingQuantizer"


class Own(type("Linear", (nn.Linear,), {"__module__": "transformer_engine.pytorch.module.linear"})):
    """A linear layer that has its own rules, and casts to `activation_dtype` what comes."""

    def __init__(self):
        super().__init__(64, 32)
        self.fp8, self.activation_dtype, self.weight_names = True, torch.float32, ["weight"]
        self.tp_group = self.parallel_mode = None
        self.sequence_parallel, self.fp8_meta = False, {}
        self.quantizers = {
            "scaling_fwd": [Quantizer("kFloat8E4M3") for _ in range(3)],
            "scaling_bwd": [Quantizer("kFloat8E5M2") for _ in range(2)],
        }


def nothing_changes(layer, step):
    """Every step is as the one before."""


def casts_otherwise(layer, step):
    """In some steps its input is cast before it is multiplied."""
    layer.activation_dtype = torch.bfloat16 if step in (3, 4, 6) else torch.float32


def quantizes_otherwise(layer, step):
    """From a step on it makes codes of another format, then scales that are powers of two."""
    layer.quantizers["scaling_fwd"][0].dtype = "kFloat8E5M2" if step > 2 else "kFloat8E4M3"
    layer.quantizers["scaling_bwd"][0].force_pow_2_scales = step > 4


def is_replaced(layer, step):
    """From a step on it holds other quantizers, one of them none that casts."""
    if step == 4:
        layer.quantizers["scaling_fwd"] = [Quantizer("kFloat8E5M2"), None, None]


def is_switched(layer, step):
    """Off for some steps."""
    layer.fp8 = step not in (3, 4)


@pytest.mark.parametrize(
    "change",
    [nothing_changes, casts_otherwise, quantizes_otherwise, is_replaced, is_switched],
    ids=lambda f: f.__name__,
)
def test_a_layer_s_own_rule_is_asked_for_on_the_shorter_way_too(change, tmp_path, monkeypatch):
    asked = []
    judge = Collector.judge
    monkeypatch.setattr(Collector, "judge", lambda *args: asked.append(args[1:3]) or judge(*args))

    def rows(folder):
        asked.clear()
        torch.manual_seed(1)
        model = nn.Sequential(layer := Own())
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        with ng.watch(model, out=folder, every=1):
            for step in range(8):
                change(layer, step)
                model(torch.randn(3, 8, 64)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        ways.append(len(asked))
        return told(folder)

    ways = []
    assert_the_same_by_either_way(rows, tmp_path, monkeypatch)
    short, long = ways
    assert long >= 8 * 3 - 4  # but for what is left in high precision
    assert short == 6 if change is nothing_changes else 6 < short < long  # in the first steps there is no other


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
def test_a_sparse_tensor_where_others_came_is_told_as_ever(tmp_path):
    host.wait()
    with followed(tmp_path, judge="current", every=1) as (session, _):
        layer = nn.Linear(32, 16, bias=False)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        for step in range(6):
            x = torch.randn(24, 32).relu()
            layer(x.to_sparse_csr() if step == 4 else x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    notes = " ".join(session.plain.notes)
    assert "CSR" in notes.upper()
    assert "failed" not in notes


class Attention(nn.Module):
    """Query and key of one input, which is written to in between."""

    def __init__(self, write):
        super().__init__()
        self.q, self.k = nn.Linear(32, 32).requires_grad_(False), nn.Linear(32, 32)
        self.write = write

    def forward(self, x):
        q = self.q(x)
        with torch.no_grad():
            self.write(x)
        return (q * self.k(x)).square().mean()


def by_numpy(x):
    x.numpy()[:] *= 3.0  # as graphs and collectives do: the tensor and its version are the same


@pytest.mark.parametrize("write", [lambda x: x.mul_(3.0), by_numpy], ids=["in place", "by numpy"])
def test_an_input_of_several_layers_is_counted_for_each_as_it_is_then(write, tmp_path, monkeypatch):
    def rows(folder):
        torch.manual_seed(1)
        model = Attention(write)
        optimizer = torch.optim.SGD(model.k.parameters(), lr=0.1)
        with ng.watch(model, out=folder, every=1):
            for _ in range(6):
                model(torch.randn(3, 8, 32)).backward()
                optimizer.step()
                optimizer.zero_grad()
        tensors = open_run(folder).tensors()
        amax = {site: tensors["amax"][tensors["site"] == site] for site in ("q:input", "k:input")}
        assert amax["k:input"] == pytest.approx(3 * amax["q:input"])
        return told(folder)

    assert_the_same_by_either_way(rows, tmp_path, monkeypatch)
