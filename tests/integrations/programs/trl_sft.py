"""Two small Llamas with LoRA, trained by TRL's SFTTrainer: one in float32, one as it trains by default, in BF16."""

import json
from pathlib import Path

from datasets import Dataset
from peft import LoraConfig
from text import pieces, place
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers import models as kinds
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

set_seed(0)
words = Tokenizer(kinds.WordLevel({"<pad>": 0, "<eos>": 1, **{chr(n): n for n in range(2, 128)}}, unk_token="<pad>"))
words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
config = LlamaConfig(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    eos_token_id=1,
    pad_token_id=0,
)
models, said = [], []
for precision in ({"bf16": False}, {}):
    arguments = SFTConfig(
        output_dir="trained",
        max_steps=3,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=0.1,
        lr_scheduler_type="constant",
        logging_steps=1,
        max_length=32,
        save_strategy="no",
        report_to="none",
        use_cpu=place().type == "cpu",
        **precision,
    )
    trainer = SFTTrainer(
        model=LlamaForCausalLM(config),
        args=arguments,
        train_dataset=Dataset.from_list([{"text": "".join(map(chr, piece))} for piece in pieces().tolist()]),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=16, lora_alpha=16, target_modules=["q_proj", "down_proj"], lora_dropout=0.0),
    )
    trainer.train()
    models.append(trainer.model)
    said += [row for row in trainer.state.log_history if "loss" in row]
Path("said.json").write_text(json.dumps(said))
