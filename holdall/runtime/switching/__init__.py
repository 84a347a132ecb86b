"""Chooses the plan of each step, and changes it."""
