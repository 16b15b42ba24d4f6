"""Megatron-Core, spread over two ranks: a GPTModel in two pipeline stages, then experts that are two on each rank.

Its own pipeline communicates on GPUs alone, so activations and gradients are sent by hand, on GPUs as well.
"""

import json
from pathlib import Path

import torch
import torch.distributed as dist
from attention import Attention
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from text import leave, pieces, place
from torch import nn


def settings(**more):
    return TransformerConfig(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=4,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        pipeline_dtype=torch.float32,
        **more,
    )


def stages(batches):
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    layers = get_gpt_layer_local_spec()
    layers.submodules.self_attention.submodules.core_attention = Attention
    ends = {"pre_process": rank == 0, "post_process": rank == 1, "share_embeddings_and_output_weights": False}
    model = GPTModel(settings(pipeline_model_parallel_size=2), layers, vocab_size=128, max_sequence_length=32, **ends)
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    positions = torch.arange(31, device=device).expand(4, 31)
    for tokens in batches:
        if rank == 0:
            sent = model(tokens[:, :-1], positions, None)
            dist.send(sent.detach().contiguous(), 1)
            gradient = torch.empty_like(sent)
            dist.recv(gradient, 1)
            sent.backward(gradient)
        else:
            received = torch.empty(31, 4, 32, device=device)
            dist.recv(received, 0)
            model.set_input_tensor(received.requires_grad_())
            loss = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).mean()
            loss.backward()
            dist.send(received.grad.contiguous(), 0)
            said.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return model


class Experts(nn.Module):
    """Four experts, of which a rank has two; it sends them the tokens that it has."""

    def __init__(self):
        super().__init__()
        config = settings(
            num_moe_experts=4, expert_model_parallel_size=2, moe_ffn_hidden_size=48, add_bias_linear=False
        )
        parts = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        self.experts = SequentialMLP(2, config, parts, ProcessGroupCollection.use_mpu_process_groups())

    def forward(self, x):
        return self.experts(x, torch.tensor([24, 40]), torch.ones(64, device=device))[0]


def experts():
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    torch.manual_seed(rank)
    model = Experts().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        x = torch.randn(64, 32).to(device)
        (model(x) - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def name_in_whole(name):
    """What a rank's layer is called in the whole model."""
    parts = name.split(".")
    lists = {"layers": 2 * rank, "local_experts": 2 * rank}
    return ".".join(
        str(int(part) + lists[before]) if before in lists else part
        for before, part in zip(["", *parts], parts, strict=False)
    )


device = place()
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
rank = dist.get_rank()
torch.manual_seed(0)
said = []
models = [stages(pieces(count=12).to(device).split(4)), experts()]
if rank == 1:
    Path("said.json").write_text(json.dumps(said))
leave()
