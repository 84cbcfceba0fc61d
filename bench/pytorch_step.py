"""The same training step as build/step, by PyTorch on the CPU, for comparison: GPT-2 124M, f32, AdamW, clip 1.0.

    python3 bench/pytorch_step.py [B] [T] [steps]        needs torch; prints tokens per second and peak memory
"""
import math
import resource
import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

B, T, steps = (int(a) for a in (sys.argv[1:] + ["4", "256", "5"][len(sys.argv) - 1 :]))
L, NH, C, V, CONTEXT = 12, 12, 768, 50257, 1024


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
        self.wte, self.wpe = nn.Embedding(V, C), nn.Embedding(CONTEXT, C)
        self.blocks = nn.ModuleList(Block() for _ in range(L))
        self.lnf = nn.LayerNorm(C)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, x, y):
        h = self.wte(x) + self.wpe(torch.arange(T))
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy((self.lnf(h) @ self.wte.weight.T).view(B * T, V), y.view(-1))


torch.manual_seed(1)
model = GPT2()
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
x, y = torch.randint(0, V, (B, T)), torch.randint(0, V, (B, T))
times = []
for step in range(steps + 1):
    start = time.perf_counter()
    optimizer.zero_grad(set_to_none=True)
    loss = model(x, y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    times.append(time.perf_counter() - start)
median = sorted(times[1:])[steps // 2]  # the first step warms up
print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, B{B} T{T}: {B * T / median:.1f} tokens/s, "
      f"{1e3 * median:.0f} ms per step, loss {loss.item():.3f}, "
      f"peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9:.2f} GB")
assert math.isfinite(loss.item())
