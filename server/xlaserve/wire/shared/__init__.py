"""Calls, requests, answers and descriptions of models as plain data, which every protocol uses.

A request passes through `call`, `inference` with `input_tensors` (checked and parsed), and `output_tensors`.

Neither gRPC nor protobuf is imported here.
"""
