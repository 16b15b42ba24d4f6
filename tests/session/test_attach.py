"""A session hears what a program does: steps, losses, norms, evaluations, skipped steps, the limit."""

import math
import runpy
import sys
from functools import reduce

import pytest
import torch
from tests.session import programs
from tests.session.inline import Writer, followed
from torch import nn

from narrowgauge.compute.nn.linear import Fp8Linear
from narrowgauge.session.attach import Session, StopTraining
from narrowgauge.session.plan import Plan
from narrowgauge.session.tensors.batches import Batches


def follow(tmp_path, program, *args, **plan):
    script = tmp_path / "train.py"
    script.write_text(program)
    writer = Writer()
    session = Session(Plan(variant="x", out=str(tmp_path), command=("train.py",), **plan), writer)
    kept, sys.argv = sys.argv, ["train.py", *args]
    try:
        runpy.run_path(str(script), run_name="__main__")
    except StopTraining:
        pass
    finally:
        sys.argv = kept
        session.finish()
    return session, writer


def test_steps_losses_norms_rates_and_tokens(tmp_path):
    session, writer = follow(tmp_path, programs.BASIC)
    assert session.ledger.steps == 8
    loss = writer.column("loss")
    assert list(loss) == list(range(1, 9))
    assert all(math.isfinite(value) for value in loss.values())
    assert set(writer.column("microbatches").values()) == {2}
    assert set(writer.column("lr").values()) == {1e-3}
    assert set(writer.column("tokens").values()) == {48}  # two microbatches of 24 samples
    assert all(value > 0 for value in writer.column("grad_norm").values())
    assert all(value > 0 for value in writer.column("step_seconds").values())


def test_the_loss_is_what_the_script_computed(tmp_path):
    exact = programs.BASIC + "\nimport json; print(json.dumps(kept))"
    exact = exact.replace("data =", "kept = []\ndata =").replace(
        "loss.backward()", "loss.backward(); kept.append(loss.item())"
    )
    script = tmp_path / "t.py"
    script.write_text(exact)
    kept, sys.argv = sys.argv, ["t.py"]
    try:
        wanted = runpy.run_path(str(script))["kept"]
    finally:
        sys.argv = kept
    _, writer = follow(tmp_path, programs.BASIC)
    sums = [a + b for a, b in zip(wanted[::2], wanted[1::2], strict=True)]
    assert list(writer.column("loss").values()) == pytest.approx(sums, rel=1e-6)


def test_an_evaluation_belongs_to_the_step_before_it(tmp_path):
    _, writer = follow(tmp_path, programs.BASIC)
    assert list(writer.column("eval_loss")) == [4, 8]
    # its time does not: it lies behind the end of step 4, so before that of step 5
    assert [writer.column("clean")[step] for step in (2, 4, 5, 6)] == [1.0, 1.0, 0.0, 1.0]


def test_the_limit_ends_the_program_after_whole_steps(tmp_path):
    session, writer = follow(tmp_path, programs.BASIC, "100", steps=5)
    assert session.ledger.steps == 5
    assert list(writer.column("loss")) == [1, 2, 3, 4, 5]


def test_twins_see_the_same_and_noise_moves_the_weights_a_little(tmp_path):
    one, a = follow(tmp_path, programs.BASIC)
    two, b = follow(tmp_path, programs.BASIC, noise=1e-6)
    assert one.facts()["weights_hash"] == two.facts()["weights_hash"]
    assert a.column("data_digest") == b.column("data_digest")
    assert a.column("loss") != b.column("loss")
    assert list(a.column("loss").values()) == pytest.approx(list(b.column("loss").values()), rel=1e-3)


def test_other_data_and_other_weights_show(tmp_path):
    first, a = follow(tmp_path, programs.UNSEEDED_DATA)
    second, b = follow(tmp_path, programs.UNSEEDED_DATA)
    assert a.column("data_digest")[1] != b.column("data_digest")[1]
    third, _ = follow(tmp_path, programs.UNSEEDED_WEIGHTS)
    assert first.facts()["weights_hash"] == second.facts()["weights_hash"] != third.facts()["weights_hash"]


def test_conversion_happens_at_the_first_call_with_gradients(tmp_path):
    session, writer = follow(tmp_path, programs.BASIC, recipe="current", every=2)
    rows = session.facts()["conversion"]
    assert {row["name"]: bool(row["recipe"]) for row in rows} == {"0": True, "2": True, "4": True}
    assert all(row["calls"] for row in rows if row["recipe"])
    assert sorted({step for step, _, _ in writer.tensors}) == [2, 4, 6, 8]
    sites = {site for _, names, _ in writer.tensors for site in names}
    assert {"0:input", "2:grad_output", "2:grad_weight"} <= sites


SPARSE = """
import torch
class Wrapped(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(16, 16)
    def forward(self, x):
        return torch.sparse.mm(x, self.layer.weight)
model = Wrapped()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.eye(16).to_sparse()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_inputs_that_are_not_hashed_are_told(tmp_path):
    session, _ = follow(tmp_path, SPARSE)
    [note] = session.facts()["notes"]
    assert note.startswith("Some inputs are sparse_coo tensors, which are not hashed")
    assert follow(tmp_path, programs.BASIC)[0].facts()["notes"] == []


def test_seams_are_gone_afterwards(tmp_path):
    before = torch.autograd.backward
    follow(tmp_path, programs.BASIC)
    assert torch.autograd.backward is before
    assert not nn.modules.module._global_forward_pre_hooks


def test_compile_is_refused_and_told(tmp_path):
    session, _ = follow(tmp_path, programs.COMPILED)
    assert session.ledger.steps == 8
    assert session.facts()["notes"] == ["The script calls torch.compile; every run here was eager."]


def test_an_operator_that_loses_gradients_where_nothing_is_compiled_is_told(tmp_path):
    looks_up = "x = torch.cond(x.sum() > 0, lambda x: x * model[0].bias.mean(), lambda x: x * 1, (x,))"
    session, _ = follow(tmp_path, programs.BASIC.replace("loss = F", f"{looks_up}\n        loss = F"))
    [note] = session.facts()["notes"]
    assert note.startswith("The script calls torch's operator 'cond', which takes functions")
    assert "such weights get no gradients. To compare, write it as plain Python" in note


def test_steps_that_are_not_finite_are_counted(tmp_path):
    session, writer = follow(tmp_path, programs.NAN_INPUT)
    assert session.ledger.rows.nonfinite_steps == 3  # from the sixth on, everything is NaN
    assert writer.column("nonfinite")[5] == 0.0
    assert math.isnan(writer.column("loss")[6])


SCALED = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
for step in range(6):
    x = torch.ones(4, 16)
    loss = model(x).square().mean()
    if step == 2:
        loss = loss * float("inf")
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""


AROUND = """
class Around(torch.optim.Optimizer):
    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self):
        scaler.step(self.inner)


around = Around(optimizer)
for step"""


@pytest.mark.parametrize("around", [False, True], ids=["by the program", "by an optimizer around"])
def test_a_scaler_s_loss_is_unscaled_and_its_skipped_step_counts_as_one(tmp_path, around):
    by = ("for step", AROUND), ("scaler.step(optimizer)", "around.step()")
    session, writer = follow(tmp_path, reduce(lambda text, pair: text.replace(*pair), by if around else (), SCALED))
    assert session.ledger.steps == 6
    assert session.facts()["skipped_steps"] == 1
    assert writer.column("skipped") == {3: 1.0}
    assert writer.column("loss_scale")[1] == 4.0
    assert writer.column("lr") == dict.fromkeys(range(1, 7), 0.01)
    assert writer.column("loss")[1] == pytest.approx(float(writer.column("loss")[2]), rel=0.2)


HIGH = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Linear(16, 16)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=FUSED)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-120)
for step in range(6):
    loss = model(torch.ones(4, 16)).square().sum() * 64
    if step == 4:
        loss = loss * float("nan")
    scaler.scale(loss).backward()
    if CLIP:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_loss_scale_that_is_too_high_makes_no_nan_steps(tmp_path, fused, clip):
    """Whoever decides that a step is skipped, and where: its gradients moved nothing. A loss is no scale's doing."""
    session, writer = follow(tmp_path, HIGH.replace("FUSED", str(fused)).replace("CLIP", str(clip)))
    assert writer.column("skipped") == {1: 1.0, 5: 1.0}
    assert writer.column("nonfinite") == {1: 0.0, 2: 0.0, 3: 0.0, 4: 0.0, 5: 1.0, 6: 0.0}
    assert [session.facts()[of] for of in ("nan_steps", "skipped_steps")] == [1, 2]


def test_a_gradient_that_is_not_finite_and_moves_the_weights_is_a_nan_step(tmp_path):
    session, writer = follow(
        tmp_path, HIGH.replace("FUSED", "False").replace("if CLIP", "optimizer.step()\n    if False")
    )
    assert writer.column("nonfinite")[1] == 1.0
    assert math.isfinite(writer.column("loss")[1])
    assert session.facts()["skipped_steps"] == 0


def test_a_mask_that_a_part_is_given_counts_no_tokens(tmp_path):
    masked = """class Masked(nn.Linear):
    def forward(self, x, mask):
        return super().forward(x) * mask[:, None]
class Model"""
    program = programs.METHOD.replace("class Model", masked).replace("nn.Linear(32, 32)", "Masked(32, 32)")
    program = program.replace("self.up(self.embed(x))", "self.up(self.embed(x), mask=x > 9)")
    _, writer = follow(tmp_path, program, compiling=True)
    assert writer.column("tokens") == dict.fromkeys(range(1, 7), 8)


def test_what_has_only_a_mask_is_counted_by_its_samples():
    assert Batches().see(torch.ones(4, 16) > 0) == 4


TEACHER = """
import torch
from torch import nn
student = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 16))
teacher = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 16))
optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
for _ in range(3):
    x = torch.randn(4, 16)
    (student(x) - teacher(x)).square().mean().backward()
    optimizer.step()
kinds = [type(m).__name__ for model in (student, teacher) for m in model]
"""


def test_a_teacher_is_left_alone(tmp_path):
    seen = []
    original = Fp8Linear.adopt

    def adopt(module, **kwargs):
        seen.append(kwargs["name"])
        return original(module, **kwargs)

    Fp8Linear.adopt = staticmethod(adopt)
    try:
        session, _ = follow(tmp_path, TEACHER, recipe="current")
    finally:
        Fp8Linear.adopt = staticmethod(original)
    assert session.facts()["models"] == 1
    assert len(seen) == len(set(seen)) <= 3


TWO_OPTIMIZERS = programs.BASIC.replace(
    "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)",
    "first, second = (torch.optim.SGD(model[i].parameters(), lr=1e-3) for i in (0, 2))\n"
    "class Both:\n    def step(self): first.step(); second.step()\n"
    "    def zero_grad(self): first.zero_grad(); second.zero_grad()\noptimizer = Both()",
)


def test_two_optimizers_make_one_step(tmp_path):
    session, writer = follow(tmp_path, TWO_OPTIMIZERS)
    assert session.ledger.steps == 8
    assert set(writer.column("microbatches").values()) == {2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_perturbing_moves_every_tensor_and_draws_nothing_from_the_script(dtype):
    from narrowgauge.session.compare import NOISE
    from narrowgauge.session.models.perturb import perturb

    model = nn.Linear(64, 64).to(dtype)
    before, state = [p.detach().clone() for p in model.parameters()], torch.get_rng_state()
    perturb(model, NOISE, 0)
    assert torch.equal(state, torch.get_rng_state())
    for p, was in zip(model.parameters(), before, strict=True):
        assert not torch.equal(p, was)
        assert torch.allclose(p, was, rtol=8 * NOISE)
        moved = ((p - was).double() / was.double()).square().mean().sqrt().item()
        assert moved == pytest.approx(NOISE, rel=0.1 if p.numel() > 64 else 0.5)


def test_of_two_models_the_one_that_can_is_converted_and_the_other_told(tmp_path):
    session, _ = follow(tmp_path, programs.GAN, recipe="current", compiling=True)
    facts = session.facts()
    assert facts["models"] == 2
    rows = [(row["name"], row["recipe"]) for row in facts["conversion"]]
    assert rows == [("0", "current"), ("2", "current"), ("Sequential1.0", None), ("Sequential1.2", None)]
    note = facts["notes"][0]
    assert note.startswith("One of the script's models stays in the baseline's precision: none of the 2 linear layers")
    assert facts["refusal"] == ""
    assert facts["unmet"] == []


UNCONVERTIBLE = """
import torch
model, waiting = torch.nn.Linear(24, 24), torch.nn.Linear(32, 32)
optimizer, other = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, waiting))
for _ in range(2):
    model(torch.ones(16, 24)).square().mean().backward()
    optimizer.step()
"""


def test_a_program_of_which_nothing_was_converted_is_told_when_it_ends(tmp_path):
    """An optimizer that never steps leaves it open whether another model will come, which could be converted."""
    session, _ = follow(tmp_path, UNCONVERTIBLE, recipe="current", compiling=True)
    facts = session.facts()
    assert facts["steps"] == 2
    [told] = facts["unmet"]
    assert told.startswith("--convert matched nothing in this program; none of the 1 linear layers of Linear")


def test_layers_of_two_models_keep_apart(tmp_path):
    session, writer = follow(tmp_path, programs.GAN.replace("24", "48"), recipe="current", every=1)
    assert [row["name"] for row in session.facts()["conversion"]] == ["0", "2", "Sequential1.0", "Sequential1.2"]
    for _, sites, _ in writer.tensors:
        assert len(set(sites)) == len(sites)
    assert any("Sequential1.0:weight" in sites for _, sites, _ in writer.tensors)


ACTOR_AND_CRITIC = """
import torch
from torch import nn
torch.manual_seed(3)
trunk, actor, critic = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(32, 48)
class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.out = trunk, actor
    def forward(self, x):
        return self.out(self.trunk(x).relu())
class Critic(Actor):
    def __init__(self):
        super().__init__()
        self.out = critic
policy, value = Actor(), Critic()
optimizer = torch.optim.Adam({*policy.parameters(), *value.parameters()})
x = torch.randn(16, 16)
for step in range(3):
    (policy(x).square().mean() + value(x).square().mean()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("recipe", [None, "current"])
def test_a_model_that_shares_layers_with_another_shows_its_own(tmp_path, recipe):
    session, writer = follow(tmp_path, ACTOR_AND_CRITIC, recipe=recipe, every=1, judge="current", compiling=True)
    for step in (1, 2, 3):
        seen = [site for at, sites, _ in writer.tensors for site in sites if at == step]
        operands = {site for site in seen if site.endswith((":input", ":weight", ":grad_output"))}
        names = ("trunk", "out", "Critic.out")
        wanted = {f"{name}:{role}" for name in names for role in ("input", "weight", "grad_output")}
        # A model is heard from its second call on, where nothing of it was converted: its root was just found.
        assert operands == wanted if step > 1 else operands <= wanted
        assert len(seen) == len(set(seen))
    facts = session.facts()
    assert (facts["models"], facts["parameters"]) == (2, sum(n * k + n for n, k in [(32, 16), (16, 32), (48, 32)]))
    assert [(row["name"], row["recipe"]) for row in facts["conversion"]] == (
        [(name, recipe) for name in ("trunk", "out", "Critic.out")] if recipe else []
    )
    assert session.roots.conversions.notes == []


SPECTRAL = """
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
torch.manual_seed(3)
model = nn.Sequential(spectral_norm(nn.Linear(16, 32)), nn.ReLU(), spectral_norm(nn.Linear(32, 16)), nn.Linear(16, 16))
optimizer = torch.optim.Adam(model.parameters())
losses = []
for step in range(3):
    loss = model(torch.randn(8, 16)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
"""


def test_a_weight_that_is_computed_is_not_looked_at_in_passing(tmp_path):
    alone = {}
    exec(compile(SPECTRAL, "spectral", "exec"), alone)
    _, writer = follow(tmp_path, SPECTRAL, every=2, judge="current", compiling=True)
    assert list(writer.column("loss").values()) == alone["losses"]


def test_what_a_model_made_is_no_data(tmp_path):
    _, a = follow(tmp_path, programs.GAN)
    _, b = follow(tmp_path, programs.GAN, noise=1e-3)
    assert a.column("loss") != b.column("loss")
    assert a.column("data_digest") == b.column("data_digest")


def test_a_model_of_which_only_parts_are_called_is_converted_whole(tmp_path):
    session, _ = follow(tmp_path, programs.METHOD, recipe="current")
    assert session.facts()["models"] == 1
    rows = {row["name"]: row["recipe"] for row in session.facts()["conversion"]}
    assert rows == {"up": "current", "lm_head": None}
    assert session.ledger.steps == 6


def test_a_wrapper_of_student_and_teacher_is_not_the_model(tmp_path):
    wrapped = TEACHER.replace("for _ in", "both = nn.ModuleDict(dict(student=student, teacher=teacher))\nfor _ in")
    session, _ = follow(tmp_path, wrapped, recipe="current")
    assert [row["name"] for row in session.facts()["conversion"]] == ["0", "1", "2"]


@pytest.mark.parametrize(
    "extra", ["torch.tensor(0.5)", "torch.ones(2, 2).to_sparse()", "torch.empty(2, device='meta')"]
)
def test_odd_inputs_do_not_disturb_the_program(tmp_path, extra):
    program = f"""
import torch
from torch import nn
class Model(nn.Linear):
    def forward(self, t, x):
        return super().forward(x)
model = Model(16, 16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model({extra}, torch.ones(4, 16)).sum().backward()
    optimizer.step()
"""
    _, writer = follow(tmp_path, program)
    assert writer.column("tokens") == {1: 4, 2: 4}


def test_nothing_hears_the_models_afterwards(tmp_path):
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    with followed(tmp_path, recipe="current"):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(16, 32)).sum().backward()
        assert model[0]._fp8.observer is not None
        optimizer.step()
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not isinstance(module, Fp8Linear) or module._fp8.observer is None


@pytest.mark.parametrize("recipes", [("current",), ("mxfp8", "current")])
def test_a_rehearsal_changes_nothing(tmp_path, recipes):
    _, a = follow(tmp_path, programs.BASIC)
    rehearsed, b = follow(tmp_path, programs.BASIC, rehearse=recipes)
    assert a.column("loss") == b.column("loss")
    assert rehearsed.facts()["conversion"] == []
    assert rehearsed.facts()["refusal"] == ""


DTYPES = """
import sys, torch
from torch import nn
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.spare = nn.Conv1d(4, 4, 3), nn.Linear(16, 16)
    def forward(self, x):
        return self.used(x) if sys.argv[1] == "unused" else self.spare(x)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with torch.autocast("cpu", torch.bfloat16):
    model(torch.ones(2, 4, 16)).sum().backward()
optimizer.step()
"""


@pytest.mark.parametrize(("which", "said"), [("used", "bfloat16"), ("unused", "no nn.Linear ran")])
def test_the_baselines_dtype_is_what_ran(tmp_path, which, said):
    session, _ = follow(tmp_path, DTYPES, which)
    assert session.facts()["baseline_dtype"] == said


def test_an_autocast_that_a_model_enters_itself_is_seen_where_it_is_watched(tmp_path):
    inside = DTYPES.replace('return self.used(x) if sys.argv[1] == "unused" else self.spare(x)', "return self.ran(x)")
    own = "    @torch.autocast('cpu', torch.bfloat16)\n    def ran(self, x):\n        return self.spare(x)\n"
    inside = inside.replace("    def forward", own + "    def forward")
    inside = inside.replace('with torch.autocast("cpu", torch.bfloat16):\n    model', "if True:\n    model")
    session, _ = follow(tmp_path, inside, judge="current", every=1, compiling=True)
    assert session.facts()["baseline_dtype"] == "bfloat16"


KEYWORDS = """
import torch
from torch import nn
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.up = nn.Embedding(64, 32), nn.Linear(32, 48)
    def forward(self, ids=None, labels=None):
        return nn.functional.cross_entropy(self.up(self.embed(ids)), labels)
class Wrapper(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module
    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)
torch.manual_seed(3)
model = Wrapper(Wrapper(Model()))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ids = torch.arange(8)
for step in range(3):
    model(CALL).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("call", ["ids=ids, labels=ids + step", "ids, labels=ids + step", "ids, ids + step"])
def test_the_first_call_counts_as_the_others_however_its_arguments_are_passed(tmp_path, call):
    _, writer = follow(tmp_path, KEYWORDS.replace("CALL", call))
    assert writer.column("tokens") == {1: 8, 2: 8, 3: 8}
    _, positional = follow(tmp_path, KEYWORDS.replace("CALL", "ids, ids + step"))
    assert writer.column("data_digest") == positional.column("data_digest")


def test_a_wrapper_leaves_no_mark_on_the_names_of_layers(tmp_path):
    _, writer = follow(tmp_path, KEYWORDS.replace("CALL", "ids, ids"), judge="current", every=1)
    sites = {site for _, sites, _ in writer.tensors for site in sites}
    assert {site.partition(":")[0] for site in sites} == {"up"}
