"""What only host functions use: launching a kernel."""

from __future__ import annotations

from .code import Decoder, Run, handles
from .program import Inst
from .scheduler import Geometry


@handles("gpu.launch_func")
def launch(d: Decoder, inst: Inst) -> Run:
    name = str(inst.attrs["kernel"]).split("@")[-1]
    counts = inst.attrs["operandSegmentSizes"]
    groups, at = [], 0
    for count in counts:
        groups.append(inst.args[at : at + count])
        at += count
    # async, grid x y z, block x y z, cluster x y z, dynamic LDS, arguments, stream
    grid = [g[0] for g in groups[1:4]]
    block = [g[0] for g in groups[4:7]]
    cluster = [g[0] for g in groups[7:10] if g]
    lds, arguments = groups[10], groups[11]

    def run(v: list, s: object) -> None:
        def sizes(slots: list[int]) -> tuple[int, ...]:
            return tuple(int(v[slot][0]) for slot in slots)

        geometry = Geometry(
            sizes(grid),
            sizes(block),
            sizes(cluster) or (1, 1, 1),
            int(v[lds[0]][0]) if lds else 0,
        )
        s.group.grid.launch_kernel(name, geometry, [v[slot] for slot in arguments])

    return run
