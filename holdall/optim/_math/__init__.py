"""What several optimizers compute with."""
