"""Arithmetic that several optimizers share."""
