"""MoE on FlyDSL: ``kernel_names`` (grammar), ``kernels`` (device code), ``moe`` (host side).

Imports point one way: ``kernels`` know nothing of ``moe``, ``moe`` nothing of ``aiter.aot``.
From outside, import ``kernel_names`` and ``moe``; only ``moe`` imports ``kernels``.
"""
