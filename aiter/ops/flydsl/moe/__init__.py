"""Host side of the fused MoE: a request becomes a plan, a plan becomes launches.

    request.py     what the host knows of a call, and what of it a table row leaves open
    tiers.py       which table row serves how many tokens
    sizes.py       everything else that depends on the number of tokens
    stages.py      a kernel name and a request -> the build keys of the two stages
    heuristics.py  the kernels for a request that no table row serves
    selection.py   request and tables -> plan
    tensors.py     a call's tensors, checked
    execute.py     plan and tensors -> launches

From outside use `aiter.fused_moe`; the ahead-of-time build also uses `request`, `tiers` and
`selection`. Nothing here may import from `aiter.aot`.
"""
