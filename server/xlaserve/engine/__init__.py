"""How batches run: `batching` forms them, `buckets` plans them, `warmup` makes, checks and times what runs them.

Knows programs only by the protocols of `program`. Nothing here imports TensorFlow.
"""
