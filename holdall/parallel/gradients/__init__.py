"""How gradients are summed over ranks that each have the whole model: compressed, round a ring, or by servers."""
