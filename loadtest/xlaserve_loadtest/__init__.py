"""A load tester that says what XLA is worth."""
