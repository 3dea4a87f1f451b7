"""Ahead-of-time builds: every kernel the runtime will ask for, compiled on a host with no GPU.

`aiter.aot.flydsl` builds the FlyDSL kernels. Nothing outside this package imports from it.
"""
