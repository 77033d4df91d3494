"""Models: their sources, the meaning of their outputs, and the life of their versions in the repository.

Nothing here knows a protocol. TensorFlow is imported only in `networks`, `sources` and `lowering`.
"""
