"""The check of models: each in a process of its own, in every mode, compared with eager execution."""
