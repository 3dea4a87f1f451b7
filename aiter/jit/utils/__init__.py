"""The machine and its tools: target GPU, linker, FlyDSL's compile backend, custom ops.

``chip_info`` and ``linker`` import neither torch nor FlyDSL; ``backend`` and
``flydsl_private`` import FlyDSL, and are the only files that touch its private names.
"""
