"""MiniMax-M3: 60 layers of grouped-query attention, 3 with a dense FFN, 57 sparse.

A decode step is step-begin, for each dense layer a launch before and one after its attention, and
one launch for each sparse layer: 64 in all.

    builds, layout, kernels/   the layer kernels
    config       dimensions, parallelism and options of one deployment
    config_file  the same as a JSON object
    dispatch     which deployments and steps take this path
    sharding     a rank's matrices out of the model's
    weights      what the kernels require of weights and caches, checked when they are bound
    execution    one width's launches in order, and their arguments
    runner       memory, preparation and steps
    contract     the regions each kernel hands over through, for the check by tracing
"""
