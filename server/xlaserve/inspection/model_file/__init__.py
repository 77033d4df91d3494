"""Model files looked into without TensorFlow: what is in them, and the configuration that serves them."""
