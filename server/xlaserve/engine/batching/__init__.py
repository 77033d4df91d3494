"""From requests that wait to batches that run, and back: a queue for each model, lanes of the device, threads.

Nothing here compiles or measures a program.
"""
