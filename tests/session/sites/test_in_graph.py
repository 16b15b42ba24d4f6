"""A recorded step of a compiled program has graphs of its own, and what is seen in them is what is seen without."""

import copy
import functools
import gc
import io
import math
import pickle
import weakref

import pytest
import torch
from tests.session.sites.compiled_programs import (
    EVERY,
    STEPS,
    Block,
    Counting,
    Net,
    compiled,
    notes,
    same_rows,
    tokens_of,
    train,
    watched,
)
from torch import nn

import narrowgauge as ng
from narrowgauge.observe.stats import Collector
from narrowgauge.session.doors import recorded_graphs
from narrowgauge.session.recorder import Recorder
from narrowgauge.session.sites import in_graph
from narrowgauge.session.sites.choice import Choice
from narrowgauge.session.sites.layer import Layer

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),  # dynamo's, of an input
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),  # inductor's
]
RECORDED = STEPS // EVERY


@pytest.fixture(autouse=True)
def anew():
    torch._dynamo.reset()
    torch.manual_seed(0)


@pytest.fixture
def show(monkeypatch):
    """How often a graph showed an input, and a gradient, while it ran."""
    shown = {"input": 0, "gradient": 0}

    def counted(kind, method):
        @functools.wraps(method)
        def run(self, *args):
            shown[kind] += 1
            return method(self, *args)

        return run

    for kind in shown:
        name = f"{kind}_in_graph"
        monkeypatch.setattr(Layer, name, counted(kind, getattr(Layer, name)))
    return shown


def both(tmp_path, net, how, options=None, **training):
    """The same program unwatched, with uncompiled recorded steps and with graphs; the graphs' run and its backend."""
    twin = copy.deepcopy(net)
    plain = Counting()
    alone = train(twin, compiled(twin, how, plain, **(options or {})), **training)
    losses, uncompiled = watched(tmp_path / "uncompiled", net, how, Counting(), "uncompiled", options, **training)
    backend = Counting()
    found, graphs = watched(tmp_path / "graphs", net, how, backend, "graphs", options, **training)
    assert losses == pytest.approx(alone, rel=1e-5)
    assert found == pytest.approx(alone, rel=1e-5)
    same_rows(uncompiled, graphs)
    same_rows(*(ng.open_run(run.path / "what_if" / "mxfp8") for run in (uncompiled, graphs)))
    assert notes(uncompiled) == notes(graphs) == []
    return graphs, backend.graphs / plain.graphs


@pytest.mark.parametrize("how", ["module", "in place", "blocks", "function"])
def test_a_recorded_step_has_one_graph_more_that_shows_every_layer(how, tmp_path, show):
    run, times = both(tmp_path, Net(), how)
    assert times == 2
    layers = 4 if how == "blocks" else 5  # the head is in no block
    assert show == {"input": layers * (RECORDED - 1), "gradient": layers * (RECORDED - 1)}
    assert len(run.sites) == 15


@pytest.mark.parametrize(("how", "reentrant"), [("module", False), ("blocks", False), ("blocks", True)])
def test_a_recomputed_forward_counts_once(how, reentrant, tmp_path):
    both(tmp_path, Net(reentrant=reentrant), how)


def test_microbatches_add_up(tmp_path):
    run, times = both(tmp_path, Net(), "module", microbatches=3)
    assert set(run.tensors(["numel"], sites="head:input")["numel"].tolist()) == {3 * 4 * 16 * 32}
    assert times == 2


def test_a_frozen_layer_has_no_gradient_and_asks_for_none(tmp_path):
    net = Net()
    net.embedding.requires_grad_(False)
    net.blocks[0].requires_grad_(False)
    run, _ = both(tmp_path, net, "module")
    assert "blocks.0.up:input" in run.sites
    assert "blocks.0.up:grad_output" not in run.sites


@pytest.mark.parametrize("options", [{"fullgraph": True}, {"dynamic": True}])
def test_a_graph_without_breaks_and_one_for_all_shapes(options, tmp_path):
    _, times = both(tmp_path, Net(), "module", options, lengths=(16, 24) if "dynamic" in options else (16,))
    assert times == (1.5 if "dynamic" in options else 2)  # all recorded steps have one of the two lengths


@pytest.mark.parametrize("how", ["module", "function"])
def test_under_autocast_and_a_default_device(how, tmp_path):
    def around():
        return torch.autocast("cpu", torch.bfloat16)

    with torch.device("cpu"):
        run, times = both(tmp_path, Net(), how, around=around)
    assert times == 2
    assert run.tensors(["numel"], sites="head:grad_output")["numel"][0] == 4 * 16 * 64


def test_a_weight_that_is_computed_from_some_step_on_ends_graphs(tmp_path):
    net, folder = Net(), tmp_path / "graphs"
    folder.mkdir()
    config = folder / "narrowgauge.toml"
    config.write_text('[watch]\nevery = 1\ncompiled = "graphs"\n')

    def then(step):
        if step == STEPS // 2:
            nn.utils.parametrizations.weight_norm(net.head)

    with ng.watch(net, out=folder / "run", config=config):
        train(net, compiled(net, "module", Counting()), then=then)
    run = ng.open_run(folder / "run")
    rows = run.tensors(["numel"])
    assert all(len(rows["step"][rows["site"] == site]) == STEPS for site in run.sites)
    (note,) = notes(run)
    assert note.endswith("not in graphs of their own: ParametrizedLinear cannot be seen in a graph.")


def test_torchaos_layers_show_their_own_casts(tmp_path):
    float8 = pytest.importorskip("torchao.float8")
    net = Net()
    float8.convert_to_float8_training(net.blocks, config=float8.Float8LinearConfig(emulate=True))
    run, times = both(tmp_path, net, "module")
    assert times == 2
    assert len(run.sites) == 15


def test_what_lies_as_before_takes_the_shorter_way_in_graphs_too(tmp_path, monkeypatch):
    asked = []
    judge = Collector.judge
    monkeypatch.setattr(Collector, "judge", lambda *args: asked.append(args[1:3]) or judge(*args))
    net = Net()
    config = tmp_path / "narrowgauge.toml"
    config.write_text('[watch]\nevery = 2\ncompiled = "graphs"\nwhat_if = ["current"]\n')
    ways = []
    for way in ("short", "long"):
        with ng.watch(net, out=tmp_path / way, config=config):
            train(net, compiled(net, "module", "aot_eager"))
        ways.append(asked.copy())
        asked.clear()
        monkeypatch.setattr(Recorder, "again", lambda *args, **own: None)
    short, long = ways
    assert len(long) == 15 * RECORDED
    assert len(short) == 15 + 5  # the first step's, and in graphs gradients lie otherwise


def test_an_evaluation_uses_the_graphs_of_other_steps(tmp_path):
    net, backend = Net(), Counting()

    def trained(folder):
        model = copy.deepcopy(net)
        run = compiled(model, "module", backend)

        def evaluate(step):
            model.eval()
            with torch.no_grad():
                run(tokens_of(step))
            model.train()

        (tmp_path / folder).mkdir()
        config = tmp_path / folder / "narrowgauge.toml"
        config.write_text('[watch]\nevery = 1\ncompiled = "graphs"\n')
        with ng.watch(model, out=tmp_path / folder / "run", config=config):
            train(model, run, then=evaluate)
        return ng.open_run(tmp_path / folder / "run")

    run = trained("a")
    assert backend.graphs == 2  # all steps are recorded: theirs, and the evaluation's
    assert set(run.tensors(["numel"], sites="head:input")["numel"].tolist()) == {4 * 16 * 32}


def test_compiled_by_inductor_it_is_the_same(tmp_path):
    net = Net(blocks=1)
    losses, uncompiled = watched(tmp_path / "a", net, "module", "inductor", "uncompiled")
    found, graphs = watched(tmp_path / "b", net, "module", "inductor", "graphs")
    assert found == pytest.approx(losses, rel=1e-5)
    same_rows(uncompiled, graphs)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_nothing_is_left_and_nothing_leaves_with_a_copy(tmp_path):
    net, found = Net(blocks=1), []
    before = {name: set(vars(module)) for name, module in net.named_modules()}

    def around_each(module, args):
        if torch.compiler.is_compiling() or in_graph.SEAT not in vars(net.head):
            return
        for copied in (copy.deepcopy(net.head), pickle.loads(pickle.dumps(net.head))):
            found.append((in_graph.SEAT in vars(copied), len(copied._forward_hooks)))
        torch.save(net.head, io.BytesIO())
        torch.jit.script(net.head)

    net.register_forward_pre_hook(around_each)
    config = tmp_path / "narrowgauge.toml"
    config.write_text('[watch]\nevery = 2\ncompiled = "graphs"\n')
    with ng.watch(net, out=tmp_path / "run", config=config):
        train(net, compiled(net, "blocks", "aot_eager"))
    assert found == [(False, 0)] * 2 * (RECORDED - 1)
    torchs_own = {"_compiled_call_impl", "__overloads__"}
    assert {name: set(vars(module)) - torchs_own for name, module in net.named_modules()} == before
    assert not any(module._forward_hooks for module in net.modules())


def test_no_input_is_held_once_a_graph_has_shown_it(tmp_path, monkeypatch):
    seen, shown = [], Layer.input_in_graph

    def show(self, x):
        seen.append(weakref.ref(x))
        shown(self, x)
        assert self.latest is not None

    monkeypatch.setattr(Layer, "input_in_graph", show)
    net = Net(blocks=1)
    config = tmp_path / "narrowgauge.toml"
    config.write_text('[watch]\nevery = 2\ncompiled = "graphs"\n')
    with ng.watch(net, out=tmp_path / "run", config=config):
        train(net, compiled(net, "module", "aot_eager"))
        gc.collect()
        assert len(seen) == 3 * (RECORDED - 1)
        assert not [known for known in seen if known() is not None]


class Refusing(Counting):
    """Cannot compile a graph that shows layers."""

    refused = 0

    def __call__(self, graph, inputs):
        if any("show" in str(node.target) for node in graph.graph.nodes):
            self.refused += 1
            raise RuntimeError("no such operator here")
        return super().__call__(graph, inputs)


@pytest.mark.parametrize("how", ["module", "function"])
@pytest.mark.parametrize("fullgraph", [False, True])
def test_what_cannot_be_compiled_runs_uncompiled(how, fullgraph, tmp_path):
    net, options = Net(), {"fullgraph": fullgraph}
    losses, uncompiled = watched(tmp_path / "a", net, how, Counting(), "uncompiled", options, microbatches=2)
    backend = Refusing()
    found, refused = watched(tmp_path / "b", net, how, backend, "graphs", options, microbatches=2)
    assert found == losses
    assert backend.refused == 1  # it is not tried again, neither in that step's other microbatches nor later
    same_rows(uncompiled, refused)
    [note] = notes(refused)
    assert note.startswith("Recorded steps ran what the program compiled uncompiled, not in graphs of their own: torch")
    assert "no such operator here" in note


class Left(Net):
    """torch leaves its graphs in a loop, and so runs this forward, and the head in it, as Python."""

    def __init__(self, leave):
        super().__init__()
        self.leave = leave

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = self.leave(block, x)
        return self.head(x).relu().tanh()


def broken(block, x):
    torch._dynamo.graph_break()
    return block(x)


@torch.compiler.disable
def disabled(block, x):
    return block(x)


@pytest.mark.parametrize("leave", [broken, disabled])
def test_what_torch_runs_outside_of_graphs_is_seen_there_and_nothing_of_ours_becomes_one(leave, tmp_path):
    plain, backend = Counting(), Counting()
    net = Left(leave)
    twin = copy.deepcopy(net)
    alone = train(twin, compiled(twin, "module", plain))
    _, uncompiled = watched(tmp_path / "a", net, "module", Counting(), "uncompiled")
    found, graphs = watched(tmp_path / "b", net, "module", backend, "graphs")
    assert found == pytest.approx(alone, rel=1e-5)
    assert backend.graphs == 2 * plain.graphs
    assert (plain.graphs > 0) == (leave is broken)
    same_rows(uncompiled, graphs)
    assert notes(graphs) == []


def test_a_graph_that_leaves_a_layer_out_is_the_last(tmp_path, monkeypatch):
    called = in_graph.called

    def deaf(module, args, kwargs, output):
        if torch.compiler.is_compiling() and module.in_features == 64:  # the blocks' second layers
            return None
        return called(module, args, kwargs, output)

    monkeypatch.setattr(in_graph, "called", deaf)
    _, run = watched(tmp_path / "a", Net(), "module", Counting(), "graphs")
    [note] = notes(run)
    assert note == "Recorded steps in whose graphs not all was seen: 1 (first blocks.0.down:grad_output)."
    steps = run.tensors(["numel"], sites="blocks.0.down:input")["step"].tolist()
    assert steps == [2, *range(6, STEPS + 1, 2)]  # but for the one whose graph left it out
    assert run.meta["watch"]["steps_in_graphs"] == 1


class Tied(Net):
    """Its head multiplies by the embedding's weight, and is no layer."""

    def forward(self, tokens):
        return nn.functional.linear(super().forward(tokens)[..., :32], self.embedding.weight)


class Convolving(Net):
    """A convolution behind its head, of an image that goes on where it begins."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Conv1d(64, 64, 3, padding=1, padding_mode="circular")

    def forward(self, tokens):
        return self.mix(super().forward(tokens).transpose(1, 2))


class Images(Net):
    """Convolutions of all kinds behind its head, one of whose results is changed in place."""

    def __init__(self):
        super().__init__(blocks=1)
        self.line = nn.Conv1d(64, 48, 3, stride=2, padding="valid")
        self.image = nn.Sequential(nn.Conv2d(3, 8, 3, padding="same", bias=False), nn.ReLU(inplace=True))
        self.groups = nn.Conv2d(8, 16, (3, 1), groups=4, dilation=2)
        self.up = nn.ConvTranspose2d(16, 4, 3, stride=2, groups=2)
        self.room = nn.Conv3d(1, 2, 2)

    def forward(self, tokens):
        x = self.line(super().forward(tokens).transpose(1, 2))
        x = self.image(x.reshape(len(tokens), 3, 16, 7).to(memory_format=torch.channels_last))
        x = self.up(self.groups(x), output_size=None)
        return self.room(input=x[:, None])


class Masked(nn.Linear):
    """A linear layer with another forward."""

    def forward(self, x):
        return nn.functional.linear(x, self.weight * 0.5, self.bias)


def with_a_masked_layer():
    net = Net()
    net.head = Masked(32, 64)
    return net


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Tied, "it multiplies outside of known layers"),
        (Convolving, "it multiplies outside of known layers"),
        (with_a_masked_layer, "it multiplies outside of known layers"),
    ],
)
def test_what_a_graph_could_not_tell_of_stays_uncompiled(make, why, tmp_path, show):
    net = make()
    losses, uncompiled = watched(tmp_path / "a", net, "module", Counting(), "uncompiled")
    backend = Counting()
    found, run = watched(tmp_path / "b", net, "module", backend, "graphs")
    assert found == losses
    assert backend.graphs == 1
    assert notes(run)[-1].endswith(f"{why}.")
    assert not any(show.values())
    same_rows(uncompiled, run)


def test_convolutions_tell_from_inside_of_graphs_as_well(tmp_path, show):
    run, times = both(tmp_path, Images(), "module")
    assert times == 2
    kinds = ("line", "image.0", "groups", "up", "room")
    assert {site for site in run.sites if site.split(":")[0] in kinds} == {
        f"{kind}:{role}" for kind in kinds for role in ("input", "weight", "grad_output")
    }
    assert show["input"] == show["gradient"] == (3 + len(kinds)) * (RECORDED - 1)


def test_a_step_that_is_one_compiled_function_stays_uncompiled(tmp_path, show):
    net = Net(blocks=1)
    config = tmp_path / "narrowgauge.toml"
    config.write_text('[watch]\nevery = 2\ncompiled = "graphs"\n')
    with ng.watch(net, out=tmp_path / "run", config=config):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        @functools.partial(torch.compile, backend="aot_eager")
        def step(tokens):
            loss = net(tokens).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        for number in range(STEPS):
            step(tokens_of(number))
    run = ng.open_run(tmp_path / "run")
    assert notes(run)[-1].endswith("its optimizer steps within a compiled function.")
    assert not any(show.values())
    assert run.tensors(["numel"], sites="head:input")["step"].tolist() == [2, 4, 6, 8]


HEARD = frozenset({(1, "a", "input")})


def chosen(wish="auto", lost=0.0, compiling=10.0, agreed=None):
    choice = Choice(wish, lambda: lost, lambda: compiling, lambda: agreed)
    assert not choice.begin(free=True)  # nothing has shown yet what there is to be seen
    choice.ended(HEARD, inside=False)
    return choice.begin(free=True)


@pytest.mark.parametrize("first", [0, 3])  # a step that runs uncompiled, and one that has graphs
def test_a_model_that_is_first_called_in_a_recorded_step_is_seen_in_graphs(first, tmp_path):
    def of(way):
        torch._dynamo.reset()
        torch.manual_seed(0)
        config, folder = tmp_path / f"{way}.toml", tmp_path / way
        config.write_text(f'[watch]\nevery = 1\ncompiled = "{way}"\n')
        body, head = Block(32), Block(32)
        for model in (body, head):
            model.compile(backend="aot_eager")
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (body, head)]
        with ng.watch(out=folder, config=config):
            for step in range(6):
                y = body(torch.ones(8, 32))
                (head(y) if step >= first else y).square().mean().backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        return ng.open_run(folder)

    graphs, uncompiled = of("graphs"), of("uncompiled")
    assert graphs.meta["watch"]["steps_in_graphs"] == 5
    table = graphs.tensors()
    assert table["step"][table["site"] == "Block1.up:input"].tolist() == [*range(first + 1, 7)]
    assert notes(graphs) == notes(uncompiled) == []
    same_rows(graphs, uncompiled)


def test_graphs_are_made_when_uncompiled_steps_have_lost_what_they_take():
    assert not chosen(lost=9.9)
    assert chosen(lost=10.0)
    assert not chosen(lost=10.0, agreed=False)  # not before the other ranks
    assert chosen(lost=0.0, agreed=True)
    assert not chosen(lost=10.0, compiling=math.inf)
    assert chosen("graphs")
    assert chosen("graphs", agreed=False)
    assert not chosen("uncompiled", lost=1e9)


def test_graphs_stay_though_making_them_has_lengthened_what_compiling_took():
    spent = [1.0]
    choice = Choice("auto", lambda: 5.0, lambda: spent[0])
    assert not choice.begin(free=True)
    choice.ended(HEARD, inside=False)
    assert choice.begin(free=True)
    spent[0] = 100.0
    choice.ended(HEARD, inside=False)
    assert choice.begin(free=True)
    choice.ended(HEARD, inside=False)
    assert choice.begin(free=True)


def test_what_is_missing_in_a_graph_is_looked_at_uncompiled_and_ends_graphs_the_third_time():
    choice, ways = Choice("graphs"), ""
    for _ in range(16):
        graphs = choice.begin(free=True)
        ways += "g" if graphs else "u"
        choice.ended(frozenset() if graphs else HEARD, inside=False)
    assert ways == "ug" + "uug" + "uuug" + "uuuuuuu"
    assert choice.notes[0].endswith("a:input was not seen in a graph.")


def test_steps_of_two_kinds_are_held_to_what_both_have():
    first, second = HEARD | {(1, "b", "input")}, HEARD | {(2, "c", "input")}
    choice, ways = Choice("graphs"), ""
    for number in range(12):
        ways += "g" if choice.begin(free=True) else "u"
        choice.ended(second if number % 2 else first, inside=False)
    assert ways == "ug" + "uu" + 8 * "g"
    assert choice.refused == ""


def test_one_watch_after_another_uses_the_graphs_of_the_first(tmp_path):
    net, backend = Net(), Counting()
    run = compiled(net, "module", backend)
    for number, name in enumerate(("first", "second")):
        config = tmp_path / f"{name}.toml"
        config.write_text('[watch]\nevery = 2\ncompiled = "graphs"\n')
        with ng.watch(net, out=tmp_path / name, config=config):
            train(net, run)
        found = ng.open_run(tmp_path / name)
        assert found.meta["watch"]["steps_in_graphs"] == RECORDED - 1
        assert found.tensors(["numel"], sites="head:grad_output")["step"].tolist() == [2, 4, 6, 8], number
    assert backend.graphs == 2


@pytest.mark.parametrize("stance", ["force_eager", "eager_on_recompile"])
def test_a_program_that_wants_no_graph_gets_none(stance, tmp_path):
    net, backend = Net(blocks=1), Counting()
    run = compiled(net, "module", backend)
    config = tmp_path / "narrowgauge.toml"
    config.write_text('[watch]\nevery = 2\ncompiled = "graphs"\n')
    run(tokens_of(0)).backward()

    def train_on(tokens):
        with torch.compiler.set_stance(stance):
            return run(tokens)

    with ng.watch(net, out=tmp_path / "run", config=config):
        losses = train(net, train_on)
    assert len(losses) == STEPS
    assert backend.graphs == 1


@pytest.mark.parametrize("strict", [False, True])
def test_what_is_exported_in_a_recorded_step_has_nothing_of_ours(strict, tmp_path):
    net, made = Net(blocks=1), []
    config = tmp_path / "narrowgauge.toml"
    config.write_text('[watch]\nevery = 2\ncompiled = "graphs"\n')
    with ng.watch(net, out=tmp_path / "run", config=config):
        run = compiled(net, "blocks", "aot_eager")
        alone = torch.export.export(net.head, (torch.randn(4, 32),), strict=strict).graph
        assert in_graph.SEAT not in vars(net.head)

        def around(tokens):
            loss = run(tokens)
            if in_graph.SEAT in vars(net.head):
                made.append(torch.export.export(net.head, (torch.randn(4, 32),), strict=strict).graph)
            return loss

        train(net, around)
    assert len(made) == RECORDED - 1
    for graph in made:
        assert [str(node.target) for node in graph.nodes] == [str(node.target) for node in alone.nodes]


def test_torch_may_keep_twice_as_many_graphs(tmp_path):
    """Two for a program that asks for static shapes and has two, and two for its recorded steps."""
    recorded_graphs._prepare.cache_clear()
    with torch._dynamo.config.patch(recompile_limit=2, automatic_dynamic_shapes=False):
        options = {"fullgraph": True}
        _, run = watched(tmp_path / "a", Net(), "module", Counting(), "graphs", options, lengths=(16, 16, 24, 24))
        assert torch._dynamo.config.recompile_limit == 4
    assert notes(run) == []
