"""Seconds for things: datasheets, measurements, links."""
