"""What a model is: where it comes from, its preprocessing, what its outputs mean, and its life in the repository."""
