"""The wire: gRPC messages to domain requests and back."""
