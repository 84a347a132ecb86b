"""What a step asks for while it is traced, and ops whose sizes depend on it."""
