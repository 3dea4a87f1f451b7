"""Device code: one kernel family a file, and `tensor_shim`, the one place that starts a kernel.

Nothing here knows of the host side in `aiter.ops.flydsl.moe`: a kernel is built from its key
alone. From outside import a family's key and builder, and `tensor_shim`.
"""
