"""Other people's layers whose tensors are judged by our recipes: real packages, one rank."""

import pytest
import torch
from tests.session.sites.recorded import recorded, same
from torch import nn

from narrowgauge.session.sites.megatron import Megatron
from narrowgauge.session.sites.tensor_parallel import Copies

pytestmark = pytest.mark.filterwarnings("ignore")


def rows(x):
    return x.detach().reshape(-1, x.shape[-1])


def test_hugging_face_conv1d_has_a_row_for_each_output_feature():
    Conv1D = pytest.importorskip("transformers.pytorch_utils").Conv1D
    torch.manual_seed(0)
    model, x, seen = nn.Sequential(Conv1D(48, 16)), torch.randn(2, 5, 16), []

    def step():
        y = model(x)
        y.retain_grad()
        seen.append(y)
        y.cos().sum().backward()

    found, notes = recorded(model, step, "rowwise")
    assert sorted(found) == ["0:grad_output", "0:input", "0:weight"]
    same(found, "0", rows(x), "input", "rowwise")
    same(found, "0", model[0].weight.t(), "weight", "rowwise")
    same(found, "0", rows(seen[0].grad), "grad_output", "rowwise")
    assert notes == ""


@pytest.mark.parametrize("how", ["eager", "batched_mm", "grouped_mm"])
def test_experts_of_transformers_are_seen_however_they_are_multiplied(how):
    pytest.importorskip("transformers")
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    torch.manual_seed(1)
    config = MixtralConfig(hidden_size=16, intermediate_size=24, num_local_experts=3, num_experts_per_tok=2)
    config._experts_implementation = how
    model = MixtralExperts(config)
    for p in model.parameters():
        nn.init.normal_(p)
    x = torch.randn(8, 16)
    chosen = torch.stack([torch.randperm(3)[:2] for _ in range(8)])
    found, notes = recorded(model, lambda: model(x, chosen, torch.full((8, 2), 0.5)).cos().sum().backward())
    assert sorted(found) == [
        f"{name}:{role}" for name in ("down_proj", "gate_up_proj") for role in ("grad_output", "input", "weight")
    ]
    same(found, "gate_up_proj", [x, x], "input")  # every token goes to two experts
    same(found, "gate_up_proj", [model.gate_up_proj], "weight")
    assert found["gate_up_proj:grad_output"]["numel"] == 8 * 2 * 48
    assert found["down_proj:input"]["numel"] == 8 * 2 * 24
    assert found["gate_up_proj:weight"]["scale_min"] < found["gate_up_proj:weight"]["scale_max"]  # one per expert
    assert notes == ""


def test_megatrons_parallel_layers_show_what_this_rank_multiplies(alone):
    layers = pytest.importorskip("megatron.core.tensor_parallel.layers")
    from megatron.core.model_parallel_config import ModelParallelConfig

    config = ModelParallelConfig(use_cpu_initialization=True, perform_initialization=False)

    class MLP(nn.Module):
        def __init__(self):
            super().__init__()
            given = {"config": config, "init_method": nn.init.normal_, "skip_bias_add": True, "tp_group": alone}
            self.up = layers.ColumnParallelLinear(16, 32, bias=False, **given)
            self.down = layers.RowParallelLinear(32, 16, bias=False, input_is_parallel=True, **given)
            self.head = layers.ColumnParallelLinear(16, 12, bias=False, skip_weight_param_allocation=True, **given)
            self.embed = nn.Embedding(12, 16)
            for p in self.parameters():
                nn.init.normal_(p)

        def forward(self, x):
            self.h = self.up(x)[0]
            self.t = self.h.tanh()
            self.z = self.down(self.t)[0]
            self.y = self.head(self.z, weight=self.embed.weight)[0]
            for made in (self.h, self.z, self.y):
                made.retain_grad()
            return self.y

    torch.manual_seed(2)
    model = MLP()
    micro, parts = [torch.randn(5, 2, 16) for _ in range(2)], []

    def step():
        for x in micro:
            model(x).cos().sum().backward()
            parts.append({
                "up:input": x, "up:grad_output": model.h.grad, "down:input": model.t, "down:grad_output": model.z.grad,
                "head:input": model.z, "head:grad_output": model.y.grad,
            })  # fmt: skip

    found, notes = recorded(model, step)
    for site in parts[0]:
        name, role = site.split(":")
        same(found, name, [part[site] for part in parts], role)
    same(found, "up", model.up.weight, "weight")
    same(found, "down", model.down.weight, "weight")
    same(found, "head", model.embed.weight, "weight")  # the shared one that it was given
    assert len(found) == 9
    assert notes == ""


def test_what_is_whole_in_megatrons_parallel_layers_counts_once(two_ranks):
    layers = pytest.importorskip("megatron.core.tensor_parallel.layers")
    from megatron.core.model_parallel_config import ModelParallelConfig

    def copies(kind, sequence=False, runtime=(), **options):
        config = ModelParallelConfig(
            use_cpu_initialization=True, tensor_model_parallel_size=2, sequence_parallel=sequence,
            perform_initialization=False,
        )  # fmt: skip
        given = {"config": config, "init_method": nn.init.normal_, "bias": False, "tp_group": two_ranks}
        layer = getattr(layers, kind)(16, 32, skip_bias_add=True, **given, **options)
        (part,) = Megatron().parts(layer, (torch.randn(5, 2, 16),), dict(runtime), torch.randn(5, 2, 16))
        return part.copies

    x_whole, dy_whole, both = Copies(("input",), 0), Copies(("grad_output",), 0), Copies(("input", "grad_output"), 0)
    assert copies("ColumnParallelLinear") == x_whole
    assert copies("ColumnParallelLinear", gather_output=True) == both
    assert copies("ColumnParallelLinear", runtime={"runtime_gather_output": True}) == both
    assert copies("RowParallelLinear", input_is_parallel=True) == dy_whole
    assert copies("RowParallelLinear", input_is_parallel=False) == both
    assert copies("ColumnParallelLinear", sequence=True) == Copies()
    assert copies("RowParallelLinear", sequence=True, input_is_parallel=True) == Copies()
    assert copies("ColumnParallelLinear", is_expert=True) == Copies()
