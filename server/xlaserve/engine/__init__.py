"""How a batch runs: programs, the compiler and its ledger, buckets, the batcher, the device."""
