"""The models that have mono kernels, one folder each."""
