"""A vocabulary head that never materialises all logits."""
