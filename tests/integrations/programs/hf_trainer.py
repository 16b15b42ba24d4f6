"""A small Llama, then a small GPT-2, whose data a worker loads, then a Llama held in BF16, each trained by
transformers' Trainer. Samples take their time, and how long a step waits for its batches is written down."""

import json
from pathlib import Path

import torch
from slow_data import Slow, write
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


class Timed(Trainer):
    """Asks for the batches of a step as it does, with a look at the clock before and after."""

    def get_batch_samples(self, *args, **kwargs):
        data, steps = self.train_dataset, self.state.global_step
        if steps and self.args.dataloader_num_workers:
            # So that nothing is left to wait for: two to a step, one that Accelerate reads ahead, two in the making.
            data.made(4 * (2 * steps + 3))
        with data.waiting():
            return super().get_batch_samples(*args, **kwargs)


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
models, said, waits = [llama, gpt2, held], {}, {}
samples = [{"input_ids": piece, "labels": piece} for piece in pieces()]
for name, model, checkpointing, workers in (
    ("llama", llama, True, 0),
    ("gpt2", gpt2, False, 1),
    ("held", held, False, 0),
):
    data = Slow(samples)
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
        dataloader_num_workers=workers,
    )
    trainer = Timed(model=model, args=arguments, train_dataset=data)
    trainer.train()
    said[name] = [row for row in trainer.state.log_history if "loss" in row]
    waits[name] = data.waits
Path("said.json").write_text(json.dumps(said))
write(waits)
