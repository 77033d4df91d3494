"""Batching: queues of requests, batches formed from them, lanes of the device and the threads that run batches.

Nothing here compiles or measures a program.
"""
