"""Lightning, in the memory that there is: one import and one line more than without."""

import lightning
import torch
from torch.nn import GELU, LayerNorm, Linear, Sequential
from torch.nn.functional import cross_entropy

import holdall

BATCH, LENGTH, WIDTH, STEPS = 16, 32, 64, 3
BUDGET = "4700KiB"


class Points(torch.utils.data.Dataset):
    """Random ones, the same each time."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return torch.randn(LENGTH, WIDTH, generator=torch.Generator().manual_seed(index)), index % 10


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        blocks = [Sequential(LayerNorm(WIDTH), Linear(WIDTH, 4 * WIDTH), GELU(), Linear(4 * WIDTH, WIDTH)) for _ in range(4)]
        self.network = Sequential(*blocks, Linear(WIDTH, 10))
        self.losses = []

    def forward(self, x):
        return self.network(x).mean(1)

    def training_step(self, batch):
        x, y = batch
        loss = cross_entropy(self(x), y)
        self.log("train_loss", loss)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch):
        x, y = batch
        self.log("validation_loss", cross_entropy(self(x), y))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


lightning.seed_everything(0)
model = Classifier()
loader = torch.utils.data.DataLoader(Points(2 * STEPS * BATCH), batch_size=BATCH, shuffle=True)
trainer = lightning.Trainer(
    max_steps=STEPS,
    accumulate_grad_batches=2,
    gradient_clip_val=0.5,
    val_check_interval=2,
    devices=1,
    logger=False,
    enable_checkpointing=False,
    enable_model_summary=False,
    callbacks=[holdall.integrations.lightning.HoldallCallback(budget=BUDGET)],
)
trainer.fit(model, loader, torch.utils.data.DataLoader(Points(BATCH), batch_size=BATCH))

losses = [*(loss.item() for loss in model.losses), trainer.callback_metrics["validation_loss"].item()]
print(losses)
