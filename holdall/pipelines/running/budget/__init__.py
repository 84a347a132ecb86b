"""One byte budget over all that a rank of a pipeline holds: what its layers save, what a step takes besides, and the choice."""
