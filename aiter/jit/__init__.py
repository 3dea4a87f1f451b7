"""What a launch needs from the host: tuned tables (``core``), and the machine (``utils``).

May be imported from anywhere; imports nothing from ``aiter.ops.flydsl`` or ``aiter.aot``.
"""
