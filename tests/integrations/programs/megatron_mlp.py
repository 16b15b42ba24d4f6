"""A small model of Megatron-Core's tensor-parallel layers, two ranks wide."""

import json
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
)
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from text import pieces
from torch import nn

torch.distributed.init_process_group("gloo")
parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
torch.manual_seed(0)
config = TransformerConfig(
    num_layers=1,
    hidden_size=32,
    ffn_hidden_size=64,
    num_attention_heads=2,
    use_cpu_initialization=True,
    tensor_model_parallel_size=2,
)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = VocabParallelEmbedding(128, 32, init_method=config.init_method, config=config)
        parts = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        self.mlp = MLP(config, parts, ffn_hidden_size=64)
        self.output_layer = ColumnParallelLinear(
            32, 128, config=config, init_method=config.init_method, bias=False, gather_output=False
        )

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        out, bias = self.mlp(hidden)
        return self.output_layer(hidden + out + bias)[0]


model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
said, total = [], 0.0
for number, tokens in enumerate(pieces(count=24).split(4)):
    loss = vocab_parallel_cross_entropy(model(tokens)[:, :-1].float().contiguous(), tokens[:, 1:]).mean() / 2
    loss.backward()
    total += loss.item()
    if number % 2:
        optimizer.step()
        optimizer.zero_grad()
        said.append(total)
        total = 0.0
if torch.distributed.get_rank() == 0:
    Path("said.json").write_text(json.dumps(said))
torch.distributed.destroy_process_group()
