"""What is decided about a kernel without a device. Pure Python: imports neither torch nor FlyDSL.

execution   the persistent grid and its task tables
build_key   what a build's key says about itself
layout      regions of memory that stages hand over through
shard       a rank's part of a dimension
trace       recording who hands over what while a kernel body is traced
check       the contract those hand-offs must keep
"""
