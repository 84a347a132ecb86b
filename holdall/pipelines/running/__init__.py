"""Runs pipelines on torch.distributed.pipelining: stages, versions of weights, and the step."""
