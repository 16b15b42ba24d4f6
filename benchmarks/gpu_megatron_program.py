"""Megatron-Core's own training loop, for `gpu_check_megatron`; knows nothing of narrowgauge.

Its schedule calls forward and backward, its distributed data parallelism holds the gradients, its mixed-precision
optimizer clips and steps; the layers are those that it builds on TransformerEngine, or its own. What it says of each
step is saved, and what all layers multiplied in the last one: in FP8 by a copy of their own quantizers, in float64 by
the formulas (`gpu_operand_sums`). The delayed recipe takes the newest amax alone, so that nearly every scale is another
one than the tensor's own would be, and one that is an update early or late would show.

    python gpu_megatron_program.py RECIPE FOLDER KIND     RECIPE: none, delayed, tensorwise, blockwise, or plain, which
                                                          is Megatron's own layers in BF16
    KIND    alone
            sharded     its distributed optimizer
            experts     four, two for each token: one grouped layer of TransformerEngine, or its own one after another
            parallel    under torchrun, the layers are tensor parallel
            pipeline    under torchrun, a layer is a stage: one forward, one backward
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
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

STEPS, MICROBATCHES, BATCH, SEQ, WIDTH, DEPTH = 6, 2, 4, 128, 256, 2
EXPERTS, CHOSEN = 4, 2  # of each layer, by each token
RATE = 1e-3
PLAIN = "plain"
NORMING = ("linear_qkv", "mlp.linear_fc1")  # of TransformerEngine's, these norm what they are given

ROUTER = "mlp.router"


def names_of(recipe: str, kind: str) -> list[str]:
    """Of all linear layers but the experts' router."""
    parts = ["self_attention.linear_qkv", "self_attention.linear_proj"]
    for fc in ("linear_fc1", "linear_fc2"):
        if kind != "experts":
            parts.append(f"mlp.{fc}")
        elif recipe == PLAIN:
            parts += [f"mlp.experts.local_experts.{i}.{fc}" for i in range(EXPERTS)]
        else:
            parts += [f"mlp.experts.{fc}.{i}" for i in range(EXPERTS)]
    return [*(f"decoder.layers.{i}.{part}" for i in range(DEPTH) for part in parts), "output_layer"]


def norms(recipe: str, name: str) -> bool:
    """Whether it norms what it is given."""
    return recipe != PLAIN and name.endswith(NORMING)


def config_of(recipe: str, kind: str, ranks: int) -> TransformerConfig:
    """A tiny GPT in BF16, or in FP8."""
    more: dict[str, Any] = {} if recipe in ("none", PLAIN) else {"fp8": "hybrid", "fp8_recipe": recipe}
    if recipe == "delayed":
        more |= {"fp8_amax_history_len": 4, "fp8_amax_compute_algo": "most_recent"}
    if kind == "experts":
        more |= {
            "num_moe_experts": EXPERTS, "moe_router_topk": CHOSEN, "moe_ffn_hidden_size": 2 * WIDTH,
            "moe_grouped_gemm": recipe != PLAIN, "moe_router_load_balancing_type": "none", "add_bias_linear": False,
        }  # fmt: skip
    return TransformerConfig(
        tensor_model_parallel_size=ranks if kind == "parallel" else 1,
        pipeline_model_parallel_size=ranks if kind == "pipeline" else 1,
        num_layers=DEPTH, hidden_size=WIDTH, ffn_hidden_size=4 * WIDTH, num_attention_heads=4,
        hidden_dropout=0.0, attention_dropout=0.0, bf16=True, params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16, deallocate_pipeline_outputs=True, gradient_accumulation_fusion=False,
        attention_backend=AttnBackend.unfused, **more,
    )  # fmt: skip


def model_of(config: TransformerConfig, recipe: str, kind: str) -> GPTModel:
    """All of it, or this rank's stage."""
    make = get_gpt_layer_local_spec if recipe == PLAIN else get_gpt_layer_with_transformer_engine_spec
    layers = make(EXPERTS, config.moe_grouped_gemm) if kind == "experts" else make()
    ends = {
        "pre_process": parallel_state.is_pipeline_first_stage(),
        "post_process": parallel_state.is_pipeline_last_stage(),
    }
    return GPTModel(config, layers, vocab_size=256, max_sequence_length=SEQ, **ends).cuda()


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


def keep(model: torch.nn.Module, names: list[str], into: dict[str, Sums]) -> None:
    """From now on sums of what the layers of these names multiply, as far as they are here."""

    def add(name: str, layer: Any, role: str, x: Tensor, gemm: int = 0) -> None:
        into[f"{name}:{role}"].add(x, role, *own(layer, role, gemm))

    def routed(name: str, layer: Any, args: Any, output: Any) -> None:
        add(name, layer, "input", normed(layer, args[0]) if hasattr(layer, "layer_norm_weight") else args[0])
        if f"{name}:weight" not in into:
            add(name, layer, "weight", layer.weight)

    def saw(name: str, layer: Any, args: Any, output: Any) -> None:
        routed(name, layer, args, output)
        y = output[0] if isinstance(output, tuple) else output
        y.register_hook(lambda dy: add(name, layer, "grad_output", dy))

    def saw_group(name: str, layer: Any, args: Any, output: Any) -> None:
        x, splits = args
        for i, part in enumerate(x.split(splits)):
            add(f"{name}.{i}", layer, "input", part, i)
            if f"{name}.{i}:weight" not in into:
                add(f"{name}.{i}", layer, "weight", getattr(layer, f"weight{i}"), i)
        y = output[0] if isinstance(output, tuple) else output
        y.register_hook(lambda dy: came_to_group(name, layer, dy.split(splits)))

    def came_to_group(name: str, layer: Any, parts: Any) -> None:
        for i, part in enumerate(parts):
            add(f"{name}.{i}", layer, "grad_output", part, i)

    for path, layer in model.named_modules():
        name = whole(path)
        if name in names:
            layer.register_forward_hook(partial(saw, name))
        elif f"{name}.0" in names:
            layer.register_forward_hook(partial(saw_group, name))
        elif name.endswith(ROUTER):  # in a function of its own, which gives no product back
            layer.register_forward_hook(partial(routed, name))


def whole(path: str) -> str:
    """A module's name in a model of all stages."""
    ahead = parallel_state.get_pipeline_model_parallel_rank() * (
        DEPTH // parallel_state.get_pipeline_model_parallel_world_size()
    )
    head, layers, rest = path.partition("decoder.layers.")
    number, dot, part = rest.partition(".")
    return f"{head}{layers}{int(number) + ahead}{dot}{part}" if layers else path


def loss_in_all(logged: list[dict[str, Tensor]], ranks: int) -> float:
    """The mean of what the last stage logged, on all ranks."""
    loss = sum(float(each["lm loss"]) for each in logged) / max(len(logged), 1)
    told = torch.tensor(loss, dtype=torch.float64, device="cuda")
    torch.distributed.broadcast(told, ranks - 1)
    return float(told)


def main() -> None:
    recipe, folder, kind = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    rank, ranks = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    meet = f"file://{folder}/ranks"
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl", rank=rank, world_size=ranks, init_method=meet)
    torch.manual_seed(1)
    config, sharded = config_of(recipe, kind, ranks), kind == "sharded"
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
    )
    model_parallel_cuda_manual_seed(1)
    gpt = model_of(config, recipe, kind)
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=sharded)
    model = DistributedDataParallel(config, settings, Float16Module(config, gpt))
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=RATE, bf16=True, params_dtype=torch.bfloat16, clip_grad=0.5,
            use_distributed_optimizer=sharded,
        ),
        [model],
    )  # fmt: skip
    config.grad_scale_func, config.finalize_model_grads_func = optimizer.scale_loss, finalize_model_grads
    schedule, data, said = get_forward_backward_func(), batches(), []
    seen: dict[str, Sums] = defaultdict(Sums)
    for step in range(STEPS):
        if step == STEPS - 1:
            keep(gpt, names_of(recipe, kind), seen)
        model.zero_grad_buffer()
        optimizer.zero_grad()
        logged = schedule(
            forward_step_func=forward_step, data_iterator=data, model=[model], num_microbatches=MICROBATCHES,
            seq_length=SEQ, micro_batch_size=BATCH, forward_only=False,
        )  # fmt: skip
        done, norm, _ = optimizer.step()
        said.append({"loss": loss_in_all(logged, ranks), "norm": float(norm), "done": bool(done)})
    (folder / f"said.{rank}.json").write_text(json.dumps(said))
    (folder / f"seen.{rank}.json").write_text(json.dumps({site: sums.parts for site, sums in seen.items()}))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
