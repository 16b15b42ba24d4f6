"""Small training programs, as their authors would have written them."""

BASIC = """
import torch, sys
import torch.nn.functional as F
from torch import nn

torch.manual_seed(3)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = torch.Generator().manual_seed(5)
for step in range(int(sys.argv[1]) if len(sys.argv) > 1 else 8):
    for _ in range(2):
        x = torch.randn(24, 32, generator=data)
        loss = F.mse_loss(model(x), x[:, :16] * 2) / 2
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 4 == 3:
        with torch.no_grad():
            value = F.mse_loss(model(torch.ones(8, 32)), torch.ones(8, 16))
        print(f"step {step + 1} eval {value:.4f}")
print("finished")
"""

NO_OPTIMIZER = "import torch\nprint(torch.nn.Linear(4, 4)(torch.ones(2, 4)).sum())\n"

NO_MODEL = """
import torch
w = torch.nn.Parameter(torch.ones(4))
optimizer = torch.optim.SGD([w], lr=0.1)
for _ in range(3):
    (w * w).sum().backward()
    optimizer.step()
"""

NO_BACKWARD = """
import torch
model = torch.nn.Linear(16, 16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(2, 16))
"""

NO_STEP = NO_BACKWARD + "model(torch.ones(2, 16)).sum().backward()\n"

RAISES = BASIC.replace('print("finished")', 'raise ValueError("the loader is empty")')

EXITS = BASIC.replace('print("finished")', "sys.exit(7)")

NO_LINEAR = """
import torch
from torch import nn
model = nn.Sequential(nn.Conv1d(4, 4, 3), nn.ReLU(), nn.Conv1d(4, 4, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(2, 4, 16)).sum().backward()
    optimizer.step()
"""

COMPILED = BASIC.replace("optimizer =", "model = torch.compile(model)\noptimizer =")

UNSEEDED_DATA = BASIC.replace(
    "data = torch.Generator().manual_seed(5)", "import time\ndata = torch.Generator().manual_seed(time.time_ns())"
)

UNSEEDED_WEIGHTS = BASIC.replace("torch.manual_seed(3)", "import time\ntorch.manual_seed(time.time_ns())")

NAN_INPUT = BASIC.replace(
    "x = torch.randn(24, 32, generator=data)",
    "x = torch.randn(24, 32, generator=data)\n        x[0, 0] = float('nan') if step == 5 else 0.0",
)

ODD_SHAPES = BASIC.replace("64", "60")
