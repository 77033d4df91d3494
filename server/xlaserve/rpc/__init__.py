"""The wire: gRPC messages to `pipeline.Request`, and `pipeline.Answer` to gRPC messages."""
