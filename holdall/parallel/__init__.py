"""Models over several ranks, on torch.distributed: sharding by torch's own engine, groups, and agreement among ranks."""
