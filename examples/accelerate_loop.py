"""A loop with `accelerate`, in the memory that there is: one import and one line more than without."""

import torch
from accelerate import Accelerator
from transformers import GPT2Config, GPT2LMHeadModel

import holdall

BATCH, LENGTH, STEPS = 8, 32, 3
BUDGET = "2100KiB"

torch.manual_seed(0)
accelerator = Accelerator(gradient_accumulation_steps=2)
config = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0, use_cache=False)
model = GPT2LMHeadModel(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
data = [torch.randint(0, 64, (LENGTH,)) for _ in range(2 * STEPS * BATCH)]
loader = torch.utils.data.DataLoader(data, batch_size=BATCH, shuffle=True)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

fitting = holdall.integrations.accelerate.fit(accelerator, model, optimizer, budget=BUDGET)

losses = []
for tokens in loader:
    with accelerator.accumulate(model):
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    losses.append(loss.item())
print(losses)
