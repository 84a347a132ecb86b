"""The implementation of `fit`: plans per batch size, corrections, and the cache between runs."""
