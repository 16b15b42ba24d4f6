"""A small Llama trained by transformers' Trainer, compiled if COMPILED is "yes"; says what was compiled.

It makes STEPS steps, and recomputes its layers if CHECKPOINTS is "yes".
"""

import json
import os
from pathlib import Path

import torch
from text import pieces, place
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

set_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
)
compiled = os.environ.get("COMPILED") == "yes"
arguments = TrainingArguments(
    output_dir="trained",
    max_steps=int(os.environ.get("STEPS", "5")),
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    gradient_checkpointing=os.environ.get("CHECKPOINTS") == "yes",
    learning_rate=1e-2,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    use_cpu=place().type == "cpu",
    torch_compile=compiled,
    torch_compile_backend="aot_eager" if compiled else None,
)
data = [{"input_ids": piece, "labels": piece} for piece in pieces()]
trainer = Trainer(model=model, args=arguments, train_dataset=data)
trainer.train()
said = {"logged": [row for row in trainer.state.log_history if "loss" in row]}
if compiled:
    counters = torch._dynamo.utils.counters
    said["graphs"] = counters["stats"]["unique_graphs"]
    said["breaks"] = dict(counters["graph_break"])
Path("said.json").write_text(json.dumps(said))
