"""Runs a training script as it is, and writes down what its linear layers saw, computed from the same tensors by hand.

    SCRIPT=train.py python by_hand.py ARGS          hand/rank0.json, hand/rank1.json, ...

Nothing of narrowgauge is imported. A global forward hook keeps every layer's input, weight and the gradient of its
output; each tensor is quantized as the recipe `current` says, and summed (by_hand_sums.py), from rows that turn with
the recorded steps, every EVERY-th being one.

Microbatches of a step are quantized one by one, and their sums added; a column's are over all of them, but on a GPU,
whose kernels count the columns of each (those of `mxfp8` are counted without kernels). So is a tensor that is cut over
ranks, part by part, but for torchao's, which has one scale. A tensor that is not all finite has no row. If RECIPES
names any, what they make of the same tensors is computed as well (by_hand_recipes.py), in every step or in those that
ASKED names, by whose order their rows turn.

A step ends with the optimizer's, however many of its own steps that is, or with one that a gradient scaler skips (or
one of DeepSpeed's ENGINES), and the next begins with a forward or backward. A layer's name is that in `model`, the
script's variable (or in `models`, if it has several), as the script's `name_in_whole(name)` has it, if that is given.
The losses are what `backward` was called on, or those of the script's own `losses`, step by step, where it calls
another.
"""

import importlib
import json
import math
import os
import runpy
import sys
from collections import Counter, defaultdict
from pathlib import Path

import torch
import torch.distributed as dist
from by_hand_sums import Sums  # beside this file
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

# Linear layers that are no nn.Linear.
KINDS = {"Conv1D", "ColumnParallelLinear", "RowParallelLinear", "MixtralTopKRouter"}


def operand(x):
    """What has one scale, and how it is cut: this rank's part of x; of torchao's layers all parts, before a cast."""
    mine = getattr(x, "_local_tensor", x)
    if hasattr(mine, "_scale"):
        return next(source for scale, source in reversed(cast) if torch.equal(scale, mine._scale))
    return all_of(x) if cast else (mine, (1, 0))


def all_of(x):
    """The whole of a DTensor, and into how many parts it is cut along which of its rows and columns."""
    if not hasattr(x, "full_tensor"):
        return x, (1, 0)
    cut = [(x.device_mesh.size(i), where.dim) for i, where in enumerate(x.placements) if where.is_shard()]
    parts, dim = cut[0] if cut else (1, 0)
    return x.full_tensor(), (parts, 1 if dim == x.dim() - 1 else 0)


def keep_casts():
    """Keep the whole of what torchao casts before it reaches a layer: parts of tensors, shards of weights."""
    function = sys.modules["torchao.float8.float8_training_tensor"]._ToFloat8ConstrFunc
    forward = function.forward

    def kept(ctx, x, scale, dtype, config, role, *rest):
        made = forward(ctx, x, scale, dtype, config, role, *rest)
        mine = getattr(made, "_local_tensor", made)
        if hasattr(x, "full_tensor"):
            cast.append((mine._scale, all_of(x.detach())))
        elif role.value == "weight":  # of FSDP2's, cast for it to gather
            shards = [torch.empty_like(x) for _ in range(dist.get_world_size())]
            dist.all_gather(shards, x.detach().contiguous())
            cast.append((mine._scale, (torch.cat(shards), (len(shards), 0))))
        return made

    function.forward = staticmethod(kept)


def norm_of(parameters, theirs=None):
    """Of all gradients as one vector, or of what else is `theirs`, and of all ranks' parts of them."""
    squares = 0.0
    for p, x in zip(parameters, theirs or [p.grad for p in parameters], strict=True):
        if x is None:
            continue
        square = all_of(x)[0].double().square().sum()
        if getattr(p, "tensor_model_parallel", False):  # Megatron's: a share of it
            dist.all_reduce(square)
        squares += square.item()
    return squares**0.5


cast = []  # (scale, (source, how it is cut))
scalars, before = defaultdict(dict), {}
reading = Counter()  # by step and embedding: positions may be looked up as well
step, stepped = 1, False
trying = False  # whether a pipeline's stage runs to learn its shapes
every = int(os.environ.get("EVERY", "1"))  # of so many steps, one is recorded
seen = {}  # (step, module, role) -> its sums
others = {}  # recipe -> (its rule by role, whether a GPU's kernels judge by it, its own such sums)
asked = [int(word) for word in os.environ.get("ASKED", "").split()]  # the steps of others, or all
losses = defaultdict(float)
alive = {}


def called(module, args, output):
    output = output[0] if isinstance(output, tuple) else output
    in_backward = torch._C._current_graph_task_id() != -1
    linear = isinstance(module, nn.Linear) or type(module).__name__ in KINDS
    if not linear or in_backward or trying or not module.training:
        return
    begin()
    alive[id(module)] = module
    if torch.is_grad_enabled() or output.requires_grad:
        watch(module, args[0], output)
    else:  # inside of a checkpoint that recomputes with gradients later
        watch(module, args[0], None)


def watch(module, x, output):
    weight = module.weight.t() if type(module).__name__ == "Conv1D" else module.weight
    count(module, x, weight, output)


def count(owner, x, weight, output, groups=1):
    add(owner, "input", x, torch.float8_e4m3fn)
    if (step, id(owner), "weight") not in seen:
        add(owner, "weight", weight, torch.float8_e4m3fn, groups)
    if output is not None and output.requires_grad:
        output.register_hook(lambda g: add(owner, "grad_output", g, torch.float8_e5m2))


def grouping(multiply):
    def multiplied(x, weight, *args, **kwargs):
        output, experts = multiply(x, weight, *args, **kwargs), weight if weight._base is None else weight._base
        if output.requires_grad:
            begin()
            count(experts, x, weight.transpose(-2, -1), output, len(weight))
        return output

    return multiplied


def add(module, role, x, dtype, groups=1):
    (x, cut), key = operand(x.detach()), (step, id(module), role)
    seen.setdefault(key, Sums(max(0, step // every - 1))).add(x, dtype, groups, cut)
    for rules, kernels, its in others.values() if not asked or step in asked else ():
        turn = asked.index(step) if asked else max(0, step // every - 1)
        its.setdefault(key, Sums(turn, rules[role], kernels)).add(x, torch.float8_e4m3fn, groups, cut)


def begin():
    global step, stepped
    step, stepped = step + stepped, False


def ends(optimizer, *_):
    """A step's rate, its norm if nothing was clipped, and the weights that it starts from."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    scalars[step].setdefault("lr", optimizer.param_groups[0]["lr"])
    scalars[step].setdefault("grad_norm", norm_of(parameters))
    before[id(optimizer)] = [p.detach().clone() for p in parameters]
    scalars[step].setdefault("param_norm", norm_of(parameters, before[id(optimizer)]))


def end(optimizer, *_):
    global stepped
    stepped = True
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    was = before.pop(id(optimizer))
    moved = norm_of(parameters, [p.detach() - old for p, old in zip(parameters, was, strict=True)])
    scalars[step].setdefault("update_ratio", moved / scalars[step]["param_norm"])


def skipping(take, optimizer_of):
    """What takes a step, or skips it; and whose step that is, by what it is called with."""

    def taken(*args, **kwargs):
        global stepped
        told = take(*args, **kwargs)
        if not stepped:  # skipped: nothing moved
            stepped, rate = True, optimizer_of(*args).param_groups[0]["lr"]
            scalars[step] |= {"lr": rate, "param_norm": math.nan, "update_ratio": math.nan}
        return told

    return taken


def trial(learn):
    """A stage that runs on what happens to lie in memory has no tensors and no tokens."""

    def tried(*args, **kwargs):
        global trying
        trying = True
        learned = learn(*args, **kwargs)
        trying = False
        return learned

    return tried


def clipping(clip):
    def clipped(parameters, *args, **kwargs):
        parameters = list(parameters)
        scalars[step]["grad_norm"] = norm_of(parameters)  # in a closure, it is after `ends`
        return clip(parameters, *args, **kwargs)

    return clipped


def read(module, args, output):
    reads = isinstance(module, nn.Embedding) or type(module).__name__ == "VocabParallelEmbedding"
    if reads and module.training and not trying and torch._C._current_graph_task_id() == -1:
        begin()
        came(module, args[0].numel())


def came(module, tokens):
    reading[step, id(module)] += tokens
    scalars[step]["tokens"] = max(count for (at, _), count in reading.items() if at == step)


def main():
    script = os.environ["SCRIPT"]  # a launcher may put words of its own before ours
    sys.argv[0] = script
    listen()
    sys.path[0] = str(Path(script).resolve().parent)
    tell(runpy.run_path(script, run_name="__main__"))
    # Not by taking all apart: gloo's threads may wait for the interpreter that waits for them.
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(0)


def listen():
    """From here on; what comes next is the script. What is imported by name lies beside this file."""
    importlib.import_module("by_hand_convolutions").watch(begin, count, came)
    for recipe in os.environ.get("RECIPES", "").split():
        recipes = importlib.import_module("by_hand_recipes")
        others[recipe] = recipes.RULES[recipe], recipe in recipes.KERNELS, {}
    nn.modules.module.register_module_forward_hook(called)
    nn.modules.module.register_module_forward_hook(read)
    register_optimizer_step_pre_hook(ends)
    register_optimizer_step_post_hook(end)
    nn.utils.clip_grad_norm_ = clipping(nn.utils.clip_grad_norm_)
    nn.utils.clip_grads_with_norm_ = clipping(nn.utils.clip_grads_with_norm_)
    nn.functional.grouped_mm = grouping(nn.functional.grouped_mm)
    torch.amp.GradScaler.step = skipping(torch.amp.GradScaler.step, lambda scaler, optimizer, *args: optimizer)
    backward = torch.autograd.backward

    def first(tensors, *args, **kwargs):
        loss = tensors[0] if isinstance(tensors, (tuple, list)) else tensors
        begin()
        if loss.numel() == 1:  # or it is what another rank's loss comes from
            losses[step] += loss.item()
        return backward(tensors, *args, **kwargs)

    torch.autograd.backward = first
    if os.environ.get("KEEP_CASTS"):
        importlib.import_module("torchao.float8")
        keep_casts()
    if os.environ.get("KEEP_HEADS"):
        importlib.import_module("by_hand_heads").keep(begin, count)
    if os.environ.get("ENGINES"):
        engine = importlib.import_module("deepspeed.runtime.engine").DeepSpeedEngine
        engine._take_model_step = skipping(engine._take_model_step, lambda engine, *args: engine.basic_optimizer)
    if os.environ.get("STAGES"):
        stage = importlib.import_module("torch.distributed.pipelining").PipelineStage
        for name in {"_forward_metadata_inference", "_shape_inference"} & vars(stage).keys():  # the latter before 2.13
            setattr(stage, name, trial(getattr(stage, name)))


def tell(found):
    """What was heard of a script that had these variables."""
    losses.update(found.get("losses", {}))
    models = found.get("models") or [found["model"]]
    whole = found.get("name_in_whole", str)
    owners = [each for model in models for each in (*model.named_modules(), *model.named_parameters())]
    names = {id(owner): whole(name).removesuffix(".weight") for name, owner in owners}
    rows = {
        recipe: [
            {"step": number, "site": f"{names[which]}:{role}", **each.row()}
            for (number, which, role), each in its.items()
            if which in names and each.finite
        ]
        for recipe, its in {"current": seen, **{name: its for name, (*_, its) in others.items()}}.items()
    }
    folder = Path("hand")
    folder.mkdir(exist_ok=True)
    rank = int(os.environ.get("RANK", "0"))
    (folder / f"rank{rank}.json").write_text(json.dumps({"rows": rows, "losses": losses, "scalars": scalars}))


if __name__ == "__main__":
    main()
