"""A loop of one's own, in the memory that there is: one import and one line more than without."""

import torch
from torch.nn import GELU, LayerNorm, Linear, Sequential
from torch.nn.functional import cross_entropy

import holdall

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, WIDTH, STEPS = 512, 64, 3
BUDGET = "4400KiB"

torch.manual_seed(0)
blocks = [Sequential(LayerNorm(WIDTH), Linear(WIDTH, 4 * WIDTH), GELU(), Linear(4 * WIDTH, WIDTH)) for _ in range(4)]
model = Sequential(*blocks, Linear(WIDTH, 10)).to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)


def read_batch():
    return torch.randn(BATCH, WIDTH, device=DEVICE), torch.randint(0, 10, (BATCH,), device=DEVICE)


def compute_loss(model, batch):
    return cross_entropy(model(batch[0]), batch[1])


harness = holdall.fit(model, optimizer, read_batch(), loss=compute_loss, budget=BUDGET)

losses = []
torch.manual_seed(1)
for _ in range(STEPS):
    batch = read_batch()
    loss = compute_loss(model, batch)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(losses)
