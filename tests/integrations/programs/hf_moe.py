"""A small Mixtral, whose experts are two parameters and run in grouped products, trained by transformers' Trainer."""

import json
from pathlib import Path

from text import pieces, place
from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainingArguments, set_seed

set_seed(0)
config = MixtralConfig(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    num_local_experts=4,
    output_router_logits=True,
)
config._experts_implementation = "grouped_mm"  # transformers' own choice as well
model = MixtralForCausalLM(config)
arguments = TrainingArguments(
    output_dir="trained",
    max_steps=3,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    learning_rate=1e-3,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    use_cpu=place().type == "cpu",
)
trainer = Trainer(model=model, args=arguments, train_dataset=[{"input_ids": p, "labels": p} for p in pieces()])
trainer.train()
logged = [row for row in trainer.state.log_history if "loss" in row]
Path("said.json").write_text(json.dumps({"logged": logged, "experts": model.config._experts_implementation}))
