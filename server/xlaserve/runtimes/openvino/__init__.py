"""Models in OpenVINO."""
