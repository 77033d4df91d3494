"""All that makes and runs programs: a package for each backend, and `watch`, which sees what XLA compiles."""
