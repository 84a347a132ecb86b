"""The run-time machinery that actions use. It knows no action by name."""
