"""CUDA graphs of modules: batches are padded to a few sizes, and each size is captured once."""
