"""The path of a request between its method and the engine: its inputs, its images decoded, run, rendered."""
