"""Decode layers as persistent FlyDSL kernels. Imports `aiter`; nothing of `aiter` imports this."""
