"""The engine: `batching` forms batches and runs them, `buckets` plans them, `warmup` makes, checks and times programs.

Programs are known only by the protocols in `program`. Nothing here imports TensorFlow.
"""
