"""Predicts seconds: from datasheets, measurements and link rates."""
