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

# A generator with FP8's shapes and a discriminator without: two models, two optimizers, one fed by the other.
GAN = """
import torch
import torch.nn.functional as F
from torch import nn
torch.manual_seed(3)
G = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32))
D = nn.Sequential(nn.Linear(32, 24), nn.LeakyReLU(), nn.Linear(24, 1))
train_G, train_D = torch.optim.Adam(G.parameters()), torch.optim.Adam(D.parameters())
for step in range(6):
    fake = G(torch.randn(8, 16))
    F.softplus(torch.cat([D(fake.detach()), -D(torch.randn(8, 32))])).mean().backward()
    train_D.step(), train_D.zero_grad()
    F.softplus(-D(fake)).mean().backward()
    train_G.step(), train_G.zero_grad()
"""

# The model is never called itself: the script calls a method, which calls the parts.
METHOD = """
import torch
import torch.nn.functional as F
from torch import nn
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.up, self.lm_head = nn.Embedding(64, 32), nn.Linear(32, 32), nn.Linear(32, 64)
    def loss(self, x):
        return F.cross_entropy(self.lm_head(self.up(self.embed(x)).relu()), x)
torch.manual_seed(3)
model = Model()
optimizer = torch.optim.Adam(model.parameters())
for step in range(6):
    model.loss(torch.randint(0, 64, (8,))).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
