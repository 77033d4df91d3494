"""What computes a model: any network between preprocessing and a task's head, as one program of TensorFlow.

`sources` bring the networks, `lowering` makes them fast on a CPU. Nothing here knows of traffic.
"""
