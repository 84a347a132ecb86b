"""Blocks that run op by op, in an order of the plan's own."""
