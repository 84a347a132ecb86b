"""Pipelines that fit themselves to their devices: unequal GPUs (HetPipe), and layers that freeze (PipeTransformer)."""
