"""Values that a step reads while it is traced, and ops whose result sizes depend on them."""
