"""Programs of models: any network between preprocessing and a task's head, as one program of TensorFlow.

`sources` build the networks, `lowering` makes them fast on a CPU. No module here knows of requests or queues.
"""
