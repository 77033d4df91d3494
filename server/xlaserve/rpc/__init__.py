"""The wire: gRPC messages to `pipeline.Request`, and `pipeline.Answer` to gRPC messages.

What another protocol would do in the same way belongs to `protocol`.
"""
