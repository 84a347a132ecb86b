"""Measuring a machine, and naming machines that are not there."""
