"""Megatron-Core's own training loop, for `gpu_check_megatron`; knows nothing of narrowgauge.

Its schedule calls forward and backward, its distributed data parallelism holds the gradients, its mixed-precision
optimizer clips and steps; the layers are those that it builds on TransformerEngine. What it says of each step is
saved, and what all layers multiplied in the last one: in FP8 by a copy of their own quantizers, in float64 by the
formulas (`gpu_operand_sums`). The delayed recipe takes the newest amax alone, so that nearly every scale is another one
than the tensor's own would be, and one that is an update early or late would show.

    python gpu_megatron_program.py RECIPE FOLDER          RECIPE: none, delayed, tensorwise or blockwise

As `torchrun --nproc-per-node 2 gpu_megatron_program.py ...` its layers are tensor parallel.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benchmarks.gpu_operand_sums import Sums, normed, own
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

STEPS, MICROBATCHES, BATCH, SEQ, WIDTH = 6, 2, 4, 128, 256
LAYERS = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
NAMES = (*(f"decoder.layers.{i}.{layer}" for i in range(2) for layer in LAYERS), "output_layer")
NORMING = ("linear_qkv", "linear_fc1")  # norm what they are given


def config_of(recipe: str, ranks: int) -> TransformerConfig:
    """A tiny GPT in BF16, or in FP8."""
    fp8: dict[str, Any] = {} if recipe == "none" else {"fp8": "hybrid", "fp8_recipe": recipe}
    if recipe == "delayed":
        fp8 |= {"fp8_amax_history_len": 4, "fp8_amax_compute_algo": "most_recent"}
    return TransformerConfig(
        tensor_model_parallel_size=ranks,
        num_layers=2, hidden_size=WIDTH, ffn_hidden_size=4 * WIDTH, num_attention_heads=4,
        hidden_dropout=0.0, attention_dropout=0.0, bf16=True, params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16, deallocate_pipeline_outputs=True, gradient_accumulation_fusion=False,
        attention_backend=AttnBackend.unfused, **fp8,
    )  # fmt: skip


def batches() -> Iterator[Tensor]:
    """Tokens [BATCH, SEQ + 1], the same in every run."""
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(256, (BATCH, SEQ + 1), generator=generator)
    while True:
        yield text.roll(1, dims=0).cuda()


def forward_step(data: Iterator[Tensor], model: Any) -> tuple[Tensor, Any]:
    """As its schedules ask for it."""
    tokens = next(data)
    positions = torch.arange(SEQ, device="cuda").expand(BATCH, SEQ)
    output = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:])
    return output, loss_of


def loss_of(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and what is logged of it."""
    loss = output.float().mean()
    return loss, {"lm loss": loss.detach().clone()}


def keep(model: torch.nn.Module, into: dict[str, Sums]) -> None:
    """From now on sums of what the layers multiply."""

    def add(name: str, layer: Any, role: str, x: Tensor) -> None:
        into[f"{name}:{role}"].add(x, role, *own(layer, role))

    def saw(name: str, layer: Any, args: Any, output: Any) -> None:
        add(name, layer, "input", normed(layer, args[0]) if name.endswith(NORMING) else args[0])
        if f"{name}:weight" not in into:
            add(name, layer, "weight", layer.weight)
        y = output[0] if isinstance(output, tuple) else output
        y.register_hook(partial(arrived, name, layer))

    def arrived(name: str, layer: Any, dy: Tensor) -> None:
        add(name, layer, "grad_output", dy)

    for name in NAMES:
        model.get_submodule(name).register_forward_hook(partial(saw, name))


def main() -> None:
    recipe, folder = sys.argv[1], Path(sys.argv[2])
    rank, ranks = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    meet = f"file://{folder}/ranks"
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl", rank=rank, world_size=ranks, init_method=meet)
    torch.manual_seed(1)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    model_parallel_cuda_manual_seed(1)
    config = config_of(recipe, ranks)
    gpt = GPTModel(config, get_gpt_layer_with_transformer_engine_spec(), vocab_size=256, max_sequence_length=SEQ).cuda()
    sharded = os.environ.get("SHARDED") == "yes"
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=sharded)
    model = DistributedDataParallel(config, settings, Float16Module(config, gpt))
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=1e-3, bf16=True, params_dtype=torch.bfloat16, clip_grad=0.5,
            use_distributed_optimizer=sharded,
        ),
        [model],
    )  # fmt: skip
    config.grad_scale_func, config.finalize_model_grads_func = optimizer.scale_loss, finalize_model_grads
    schedule, data, said = get_forward_backward_func(), batches(), []
    seen: dict[str, Sums] = defaultdict(Sums)
    for step in range(STEPS):
        if step == STEPS - 1:
            keep(gpt, seen)
        model.zero_grad_buffer()
        optimizer.zero_grad()
        logged = schedule(
            forward_step_func=forward_step, data_iterator=data, model=[model], num_microbatches=MICROBATCHES,
            seq_length=SEQ, micro_batch_size=BATCH, forward_only=False,
        )  # fmt: skip
        done, norm, _ = optimizer.step()
        loss = sum(float(each["lm loss"]) for each in logged) / len(logged)
        said.append({"loss": loss, "norm": float(norm), "done": bool(done)})
    (folder / f"said.{rank}.json").write_text(json.dumps(said))
    (folder / f"seen.{rank}.json").write_text(json.dumps({site: sums.parts for site, sums in seen.items()}))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
