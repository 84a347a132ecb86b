"""Planners for pipelines whose ranks also use host memory, or one another's. Their figures are simulated."""
