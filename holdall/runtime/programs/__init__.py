"""Runs blocks op by op, in an order that the plan chooses."""
