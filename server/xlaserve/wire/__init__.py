"""The protocols of clients: `grpc` and `http`, and in `shared` what both have in common, as plain data."""
