"""TensorFlow's programs, one for each mode and bucket, and the devices that they run on.

The only package that runs TensorFlow; `model` builds networks with it, and `cache` takes its executables in and out.
"""
