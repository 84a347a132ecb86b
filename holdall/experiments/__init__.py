"""Experiments that the command line and the benchmarks run: ladders, peers, sweeps, the demo, workloads."""
