"""A tiny GPTModel of Megatron-Core, two ranks wide: its schedules' backward, losses emptied before it as they do."""

import json
from pathlib import Path

import torch
from attention import Attention
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.transformer_config import TransformerConfig
from text import leave, pieces, place

device = place()
torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
torch.manual_seed(0)
config = TransformerConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    use_cpu_initialization=True,  # then the ranks have alike what they share
    tensor_model_parallel_size=2,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    deallocate_pipeline_outputs=True,
)
layers = get_gpt_layer_local_spec()
layers.submodules.self_attention.submodules.core_attention = Attention
model = GPTModel(config, layers, vocab_size=128, max_sequence_length=32).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
said, losses, total = [], {}, 0.0
for number, tokens in enumerate(pieces(count=24).to(device).split(4)):
    positions = torch.arange(31, device=device).expand(4, 31)
    loss = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).mean() / 2
    total += loss.item()
    schedules.deallocate_output_tensor(loss, config.deallocate_pipeline_outputs)
    schedules.backward_step(None, loss, None, model.model_type, config)
    if number % 2:
        optimizer.step()
        optimizer.zero_grad()
        said.append(total)
        losses[len(said)] = total
        total = 0.0
if torch.distributed.get_rank() == 0:
    Path("said.json").write_text(json.dumps(said))
leave()
