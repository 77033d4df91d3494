"""Resizing as other libraries do it, to the bit, in NumPy: `resize.resize` chooses the filter."""
