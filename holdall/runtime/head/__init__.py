"""A vocabulary head that never holds all logits."""
