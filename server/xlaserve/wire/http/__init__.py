"""HTTP: the Open Inference Protocol's REST, and tasks by name for images as browsers and curl send them."""
