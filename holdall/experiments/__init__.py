"""What the command line and the benchmarks both run: ladders, peers, sweeps, the demo, workloads."""
