"""What happens to activations in a run: recompute, offload, compress."""
