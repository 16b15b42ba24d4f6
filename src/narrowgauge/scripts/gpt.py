"""Train a small Llama on the source code of Python's own standard library: plain PyTorch, one file.

    python gpt.py                              150 steps of `tiny`, a minute or less on two CPU cores
    python gpt.py --size 1b --compile          one billion parameters, for one large GPU
    python gpt.py --corpus DIR --steps 1000    any folder of text instead of the standard library

The model predicts the next byte (vocabulary 256), so it needs no tokenizer and downloads nothing:

    h    = embed(bytes)                                            every row of the stream is one position
    h   += out(softmax(q k^T / sqrt(E) + causal mask) v)           q, k rotated by their position (RoPE)
    h   += down(silu(gate(norm(h))) * up(norm(h)))                 SwiGLU
    loss = cross_entropy(lm_head(norm(h)), next byte)              in nats; perplexity = exp(loss)

Every matmul runs in BF16 under autocast; weights, their gradients and the optimizer's state stay as
`--weights` says (float32 unless asked otherwise). Sources: Llama 2 (arXiv:2307.09288) for the blocks,
RoFormer (2104.09864) for RoPE, GLU variants (2002.05202) for SwiGLU, GPT-2 for the initial weights,
GPT-3 (2005.14165) for AdamW.

Legend: B = sequences, T = positions, D = model width, F = hidden width of the MLP, H = query heads,
G = key/value heads, E = D / H = width of one head, V = vocabulary.
"""

from __future__ import annotations

import argparse
import math
import sys
import sysconfig
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# ------------------------------------------------------------------------------------------------- sizes


@dataclass(frozen=True)
class Size:
    """One model and the batch and learning rate that suit it; every flag of the same name overrides."""

    dim: int  # D
    ffn: int  # F
    heads: int  # H
    kv_heads: int  # G, fewer than H is grouped-query attention
    layers: int
    batch: int  # sequences per microbatch
    seq: int  # T
    lr: float  # peak learning rate
    vocab: int = 256


SIZES = {
    "tiny": Size(dim=128, ffn=384, heads=4, kv_heads=2, layers=4, batch=4, seq=64, lr=2e-3),
    "small": Size(dim=256, ffn=768, heads=4, kv_heads=2, layers=6, batch=8, seq=256, lr=2e-3),
    "medium": Size(dim=768, ffn=2048, heads=12, kv_heads=4, layers=12, batch=16, seq=512, lr=1e-3),
    "large": Size(dim=1024, ffn=2816, heads=16, kv_heads=8, layers=24, batch=8, seq=1024, lr=6e-4),
    "1b": Size(dim=2048, ffn=8192, heads=32, kv_heads=8, layers=16, batch=4, seq=2048, lr=3e-4),
    "8b-slice": Size(dim=4096, ffn=14336, heads=32, kv_heads=8, layers=8, batch=2, seq=4096, lr=2e-4),
}

# ------------------------------------------------------------------------------------------------- model


def rotary_table(seq: int, head_dim: int, base: float = 10000.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines of position * base^(-2i/E), each [T, E/2], float32."""
    frequency = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angle_TE = torch.arange(seq, dtype=torch.float32)[:, None] * frequency
    return angle_TE.cos(), angle_TE.sin()


def rotate(x_BHTE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE: turn each pair (x_i, x_{i + E/2}) by its position's angle; q·k then sees distances."""
    a, b = x_BHTE.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x_BHTE.dtype)


class Attention(nn.Module):
    """Causal self-attention; query, key and value come out of one matmul."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads, self.kv_heads = size.heads, size.kv_heads
        self.head_dim = size.dim // size.heads
        self.qkv = nn.Linear(size.dim, (size.heads + 2 * size.kv_heads) * self.head_dim, bias=False)
        self.out = nn.Linear(size.dim, size.dim, bias=False)

    def forward(self, x_BTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """What each position gathers from itself and the ones before it: [B, T, D] -> [B, T, D]."""
        B, T, D = x_BTD.shape
        qkv = self.qkv(x_BTD).view(B, T, -1, self.head_dim).transpose(1, 2)
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        grouped = self.heads != self.kv_heads
        y_BHTE = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        y_BTD: Tensor = self.out(y_BHTE.transpose(1, 2).reshape(B, T, D))
        return y_BTD


class MLP(nn.Module):
    """SwiGLU; gate and up come out of one matmul."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate_up = nn.Linear(size.dim, 2 * size.ffn, bias=False)
        self.down = nn.Linear(size.ffn, size.dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Each position on its own: [B, T, D] -> [B, T, D]."""
        gate, up = self.gate_up(x_BTD).chunk(2, dim=-1)
        y_BTD: Tensor = self.down(F.silu(gate) * up)
        return y_BTD


class Block(nn.Module):
    """Attention, then MLP; each reads a normalized copy of the stream and adds to the stream itself."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(size.dim, eps=1e-5)
        self.attn = Attention(size)
        self.mlp_norm = nn.RMSNorm(size.dim, eps=1e-5)
        self.mlp = MLP(size)

    def forward(self, h_BTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The stream after this block: [B, T, D] -> [B, T, D]."""
        h_BTD = h_BTD + self.attn(self.attn_norm(h_BTD), cos, sin)
        h_BTD = h_BTD + self.mlp(self.mlp_norm(h_BTD))
        return h_BTD


class Llama(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocab, size.dim)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.dim, eps=1e-5)
        self.lm_head = nn.Linear(size.dim, size.vocab, bias=False)
        cos, sin = rotary_table(size.seq, size.dim // size.heads)
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", cos, persistent=False)  # not persistent: it follows from the size
        self.register_buffer("sin", sin, persistent=False)
        self.init_weights(size.layers)

    def init_weights(self, layers: int) -> None:
        """N(0, 0.02^2); the 2 * layers matmuls that add to the stream start narrower by sqrt(2 * layers)."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                adds_to_stream = name.endswith(("attn.out.weight", "mlp.down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if adds_to_stream else 0.02)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits of every next byte: [B, T] integers -> [B, T, V]."""
        T = tokens_BT.shape[1]
        h_BTD = self.embed(tokens_BT)
        for block in self.blocks:
            h_BTD = block(h_BTD, self.cos[:T], self.sin[:T])
        logits_BTV: Tensor = self.lm_head(self.norm(h_BTD))
        return logits_BTV


# -------------------------------------------------------------------------------------------------- data

TEXT = {".py", ".txt", ".md", ".rst"}
# Other people's packages, and what some systems install apart; then tables rather than programs.
SKIP = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3", "ensurepip"}
SKIP |= {"turtledemo", "encodings", "pydoc_data"}


class CorpusError(Exception):
    """There is no text to train on; the message says where it was looked for and what to do."""


def read_corpus(folder: Path | None) -> tuple[bytes, bytes]:
    """All text below `folder` (default: the standard library), as (training, validation) bytes.

    Files are sorted by name and every tenth goes to validation: the split depends on nothing but the files.
    """
    if folder is None:
        root, skip, suffixes = Path(sysconfig.get_path("stdlib")), SKIP, {".py"}
        advice = "this Python ships without its sources; point --corpus at any folder of text files"
    else:
        root, skip, suffixes = folder, set[str](), TEXT
        advice = f"--corpus wants a folder with files ending in {', '.join(sorted(TEXT))}"
    if not root.is_dir():
        raise CorpusError(f"no folder {root}; {advice}.")
    files = sorted(p for p in root.rglob("*") if p.suffix in suffixes and p.is_file())
    texts = [p.read_bytes() for p in files if skip.isdisjoint(p.relative_to(root).parts)]
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise CorpusError(f"no text in {root}; {advice}.")
    if len(texts) == 1:  # one long file: its last tenth validates
        cut = len(texts[0]) * 9 // 10
        return texts[0][:cut], texts[0][cut:]
    held_out = b"\n".join(texts[min(9, len(texts) - 1) :: 10])
    training = b"\n".join(text for i, text in enumerate(texts) if i % 10 != min(9, len(texts) - 1))
    return training, held_out


class Tokens:
    """Bytes on the device, cut into windows of T + 1: inputs are the first T, targets the last T."""

    def __init__(self, text: bytes, seq: int, device: torch.device, what: str) -> None:
        if len(text) < seq + 2:
            raise CorpusError(
                f"the {what} text has {len(text)} bytes and one window needs {seq + 2}; "
                "give --corpus more text or --seq a smaller number."
            )
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
        self.window = torch.arange(seq + 1, device=device)
        self.starts = len(text) - seq  # how many places a window can start at

    def at(self, start_B: Tensor) -> tuple[Tensor, Tensor]:
        """The windows that begin at the given offsets: (inputs, targets), each [B, T], int64."""
        window = self.bytes[start_B[:, None] + self.window].long()
        return window[:, :-1], window[:, 1:]

    def sample(self, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """A random microbatch; drawn on the device, so the host never waits for it."""
        start = torch.randint(self.starts, (batch,), device=self.bytes.device, generator=generator)
        return self.at(start)


def unigram_entropy(text: Tensor) -> float:
    """Nats per byte of a model that knows nothing but how frequent each byte is."""
    p = torch.bincount(text.long(), minlength=256).double() / text.numel()
    return float(-(p * p.clamp_min(1e-300).log()).sum())


# ---------------------------------------------------------------------------------------------- training


def learning_rate(step: int, steps: int, peak: float, warmup: float = 0.07) -> float:
    """Linear warm-up over the first 7% of the steps, then half a cosine down to a tenth of the peak."""
    rise = max(1, round(warmup * steps))
    if step < rise:
        return peak * (step + 1) / rise
    done = (step - rise) / max(1, steps - rise)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def make_optimizer(model: nn.Module, lr: float, device: torch.device) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves norms alone."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8, fused=device.type == "cuda")


def next_byte_loss(model: nn.Module, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
    """Mean cross-entropy in nats per byte; the softmax runs in float32."""
    with torch.autocast(tokens_BT.device.type, dtype=torch.bfloat16):
        logits_BTV = model(tokens_BT)
    return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())


@torch.no_grad()
def evaluate(model: nn.Module, data: Tokens, batch: int, batches: int) -> float:
    """Mean loss over windows spread evenly over the validation text, the same ones every time."""
    model.eval()
    starts = torch.linspace(0, data.starts - 1, batch * batches, device=data.bytes.device).long()
    losses = [next_byte_loss(model, *data.at(start_B)) for start_B in starts.view(batches, batch)]
    model.train()
    return torch.stack(losses).mean().item()


def train(args: argparse.Namespace, size: Size, device: torch.device) -> float:
    """Run the whole training; return the last validation loss."""
    torch.manual_seed(args.seed)
    training, validation = read_corpus(args.corpus)
    train_data = Tokens(training, size.seq, device, "training")
    eval_data = Tokens(validation, size.seq, device, "validation")
    with device:
        model: nn.Module = Llama(size)
    if args.weights == "bfloat16":
        model = model.bfloat16()
    optimizer = make_optimizer(model, size.lr, device)
    count = sum(p.numel() for p in model.parameters())
    tokens_per_step = args.accum * size.batch * size.seq
    print(f"{args.size}: {count:,} parameters, {tokens_per_step:,} bytes per step, {args.steps} steps, {device}")
    print(
        f"text: {len(training):,} bytes to train on, {len(validation):,} to validate on, "
        f"unigram entropy {unigram_entropy(eval_data.bytes):.3f} nats"
    )
    if args.compile:
        model.compile()
    # A generator of its own: which text a step sees depends on the seed, not on who else drew random numbers.
    generator = torch.Generator(device).manual_seed(args.seed)
    eval_loss, clock, since = math.nan, time.perf_counter(), 0
    for step in range(args.steps):
        lr = learning_rate(step, args.steps, size.lr)
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss_sum = torch.zeros((), device=device)
        for _ in range(args.accum):
            loss = next_byte_loss(model, *train_data.sample(size.batch, generator))
            (loss / args.accum).backward()
            loss_sum += loss.detach()
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        since += 1

        last = step + 1 == args.steps
        if step % args.log_every == 0 or last:
            mean_loss = loss_sum.item() / args.accum  # the only place where the host waits for the device
            ms = (time.perf_counter() - clock) / since * 1e3
            print(
                f"step {step + 1:>5}/{args.steps}  loss {mean_loss:.4f}  grad norm {grad_norm.item():.3f}  "
                f"lr {lr:.2e}  {ms:.0f} ms  {tokens_per_step / ms * 1e3:,.0f} bytes/s",
                flush=True,
            )
            clock, since = time.perf_counter(), 0
        if (step + 1) % args.eval_every == 0 or last:
            eval_loss = evaluate(model, eval_data, size.batch, args.eval_batches)
            print(f"step {step + 1:>5}/{args.steps}  validation loss {eval_loss:.4f}  ", end="")
            print(f"perplexity {math.exp(eval_loss):.3f}", flush=True)
            clock, since = time.perf_counter(), 0
    return eval_loss


# ------------------------------------------------------------------------------------------ command line


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; flags left out take the value of `--size`."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="tiny", help="the model (default: tiny)")
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps (default: 150)")
    parser.add_argument("--batch", type=int, help="sequences per microbatch")
    parser.add_argument("--seq", type=int, help="positions per sequence")
    parser.add_argument("--accum", type=int, default=2, help="microbatches per step (default: 2)")
    parser.add_argument("--lr", type=float, help="peak learning rate")
    parser.add_argument("--vocab", type=int, help="rows of the embedding, 256 or more")
    parser.add_argument("--layers", type=int, help="number of blocks")
    parser.add_argument("--clip", type=float, default=1.0, help="largest gradient norm (default: 1)")
    parser.add_argument("--weights", choices=("float32", "bfloat16"), default="float32", help="dtype of the weights")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 (default: auto)")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    parser.add_argument("--corpus", type=Path, help="a folder of text (default: the standard library's source)")
    parser.add_argument("--log-every", type=int, default=10, metavar="N", help="print every N steps (default: 10)")
    parser.add_argument("--eval-every", type=int, default=50, metavar="N", help="validate every N steps (default: 50)")
    parser.add_argument("--eval-batches", type=int, default=8, metavar="N", help="microbatches per validation")
    args = parser.parse_args(argv)
    for name in ("steps", "batch", "seq", "accum", "layers", "log_every", "eval_every", "eval_batches"):
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} is {value}; it must be 1 or more.")
    if args.vocab is not None and args.vocab < 256:
        parser.error(f"--vocab is {args.vocab}; the text is bytes, so it must be 256 or more.")
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device is {args.device} and torch sees no GPU; try --device cpu, or check the driver.")
    return args


def main(argv: list[str] | None = None) -> int:
    """Train, and return the exit code."""
    args = parse(argv)
    changes = {name: getattr(args, name) for name in ("batch", "seq", "lr", "vocab", "layers")}
    size = replace(SIZES[args.size], **{name: value for name, value in changes.items() if value is not None})
    wanted = args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    try:
        train(args, size, torch.device(wanted))
    except CorpusError as error:
        print(f"gpt.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
