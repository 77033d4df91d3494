"""TensorFlow's programs, one for each mode and bucket, and the devices that they run on.

The only package that runs TensorFlow; `models` builds networks with it, and `programs.cache` keeps its executables.
"""
