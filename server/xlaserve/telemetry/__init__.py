"""What the server says of itself: metrics, logs, and the HTTP endpoints that show them."""
