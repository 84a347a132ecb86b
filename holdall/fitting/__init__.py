"""`fit` behind the scenes: plans per size of batch, corrections, what is remembered between runs."""
