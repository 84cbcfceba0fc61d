"""The same training step as build/step, by PyTorch, for comparison: GPT-2, AdamW, clip 1.0, one process.

    python3 bench/pytorch_step.py [B] [T] [steps] [--device cuda] [--dtype bf16] [--compile]        needs torch
                                  [--layers 12] [--heads 12] [--channels 768] [--context 1024] [--vocab 50257]

dtype is f32 or, on cuda, tf32 (matmuls) or bf16 (autocast; parameters, gradients and moments stay f32). On cuda the
vocabulary is padded to a multiple of 128, as ours is, and the rate of a large matmul is shown beside. Prints the
median step of `steps`, after three that warm up (one on the CPU).
"""
import argparse
import contextlib
import math
import resource
import sys
import time

try:
    import torch
    import torch.nn as nn
    import torch.nn.functional as F
except ImportError as error:
    torch = error

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
for name, default in (("B", 4), ("T", 256), ("steps", 5)):
    parser.add_argument(name, type=int, nargs="?", default=default)
parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
parser.add_argument("--dtype", choices=("f32", "tf32", "bf16"), default="f32")
parser.add_argument("--compile", action="store_true")
for name, default in (("layers", 12), ("heads", 12), ("channels", 768), ("context", 1024), ("vocab", 50257)):
    parser.add_argument(f"--{name}", type=int, default=default)
options = parser.parse_args()
B, T, device, cuda = options.B, options.T, options.device, options.device == "cuda"
if options.dtype != "f32" and not cuda:
    parser.error("--dtype tf32 and bf16 need --device cuda")
L, NH, C, V, CONTEXT = options.layers, options.heads, options.channels, options.vocab, options.context
if not (B > 0 and 0 < T <= CONTEXT and options.steps > 0):
    parser.error(f"expected B and steps from 1, T in [1, {CONTEXT}], found {B}, {options.steps}, {T}")
if isinstance(torch, ImportError):
    sys.exit(f"pytorch_step: {torch}: pip install torch")
VOCAB = V if not cuda else -(-V // 128) * 128


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.qkv, self.proj = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.fc, self.fcproj = nn.Linear(C, 4 * C), nn.Linear(4 * C, C)

    def forward(self, x):
        q, k, v = (z.view(B, T, NH, C // NH).transpose(1, 2) for z in self.qkv(self.ln1(x)).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.fcproj(F.gelu(self.fc(self.ln2(x)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, C), nn.Embedding(CONTEXT, C)
        self.blocks = nn.ModuleList(Block() for _ in range(L))
        self.lnf = nn.LayerNorm(C)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, x, y):
        h = self.wte(x) + self.wpe(torch.arange(T, device=x.device))
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(F.linear(self.lnf(h), self.wte.weight).view(B * T, VOCAB), y.view(-1))


def now():
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def matmul_tflops(n=8192, times=20):
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16 if options.dtype == "bf16" else None) for _ in "ab")
    a @ b
    start = now()
    for _ in range(times):
        a @ b
    return 2e-12 * n**3 * times / (now() - start)


torch.manual_seed(1)
torch.backends.cuda.matmul.allow_tf32 = options.dtype == "tf32"
rate = f", a matmul of 8192 {matmul_tflops():.0f} TFLOP/s" if cuda else ""
model = GPT2().to(device)
run = torch.compile(model) if options.compile else model
autocast = torch.autocast("cuda", torch.bfloat16) if options.dtype == "bf16" else contextlib.nullcontext()
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
x, y = (torch.randint(0, V, (B, T), device=device) for _ in "xy")
times, warm_up = [], 3 if cuda else 1
for step in range(options.steps + warm_up):
    start = now()
    optimizer.zero_grad(set_to_none=True)
    with autocast:
        loss = run(x, y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    times.append(now() - start)
median = sorted(times[warm_up:])[options.steps // 2]
peak = torch.cuda.max_memory_allocated() if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
where = torch.cuda.get_device_name() if cuda else f"{torch.get_num_threads()} threads"
print(f"torch {torch.__version__}, {where}, {options.dtype}{', compiled' if options.compile else ''}, B{B} T{T}: "
      f"{B * T / median:.1f} tokens/s, {1e3 * median:.1f} ms per step, loss {loss.item():.3f}, "
      f"peak {peak / 1e9:.2f} GB{rate}")
assert math.isfinite(loss.item())
