"""Optimizer updates made during backward."""
