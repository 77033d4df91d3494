"""Programs of models: any network between preprocessing and a task's head, as one program of TensorFlow.

`assemble` puts them together, `reading` chooses the task and `heads` computes its outputs. `cached` and `kept_*` keep
programs in the compile cache, by `model_identity`.

`sources` build the networks, `lowering` makes them fast on a CPU. No module here knows of requests or queues.
"""
