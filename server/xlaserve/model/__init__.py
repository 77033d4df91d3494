"""What a model is: where it comes from, what its outputs mean, and its life in the repository.

Knows no protocol. TensorFlow is imported only in `networks`, `sources` and `lowering`.
"""
