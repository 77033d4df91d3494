"""Images: decoded, turned upright, fitted to a model's input, drawn into, and sent as class maps."""
