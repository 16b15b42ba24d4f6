"""A small Llama, then a small GPT-2, then a Llama held in BF16, each trained by transformers' Trainer."""

import json
from pathlib import Path

import torch
from text import pieces, place
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

set_seed(0)
sizes = {
    "vocab_size": 128,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
llama = LlamaForCausalLM(LlamaConfig(intermediate_size=64, **sizes))
gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=128, n_embd=32, n_layer=2, n_head=2, n_positions=32))
held = LlamaForCausalLM(LlamaConfig(intermediate_size=144, **sizes)).to(torch.bfloat16)  # 144 is no multiple of 128, 32
models, said = [llama, gpt2, held], {}
data = [{"input_ids": piece, "labels": piece} for piece in pieces()]
for name, model, checkpointing in (("llama", llama, True), ("gpt2", gpt2, False), ("held", held, False)):
    arguments = TrainingArguments(
        output_dir="trained",
        max_steps=3,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        gradient_checkpointing=checkpointing,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=place().type == "cpu",
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
    said[name] = [row for row in trainer.state.log_history if "loss" in row]
Path("said.json").write_text(json.dumps(said))
