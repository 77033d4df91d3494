"""Descriptions of model files without TensorFlow: their content, and the configuration that serves them.

`formats` recognises a file, a module of that format makes its `description`, `serving` makes the configuration, for
which `reading` suggests the task, and `text` prints both.
"""
