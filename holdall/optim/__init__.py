"""Low-memory optimizers, plain torch.optim classes; none yet."""
