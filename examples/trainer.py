"""The `Trainer` of Hugging Face, in the memory that there is: one import and one line more than without."""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import holdall

BATCH, LENGTH, STEPS = 8, 32, 3
BUDGET = "2100KiB"


class Tokens(torch.utils.data.Dataset):
    """Random ones, the same each time."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        tokens = torch.randint(0, 64, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


set_seed(0)
config = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0, use_cache=False)
model = GPT2LMHeadModel(config)
trainer = Trainer(
    model,
    TrainingArguments(
        tempfile.mkdtemp(),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        lr_scheduler_type="cosine",
        warmup_steps=1,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="no",
        report_to="none",
    ),
    train_dataset=Tokens(16 * BATCH),
    eval_dataset=Tokens(BATCH),
    callbacks=[holdall.integrations.HoldallCallback(budget=BUDGET)],
)
trainer.train()

losses = [row[key] for row in trainer.state.log_history for key in ("loss", "eval_loss") if key in row]
print(losses)
