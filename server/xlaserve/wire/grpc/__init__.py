"""gRPC: messages to `pipeline.Request`, and `pipeline.Answer` to messages."""
