"""Whole decode layers in one to three launches each.

    device/   the stages that kernels are composed of
    plan/     what is decided without a device: task tables, regions, shards, the hand-off check
    runtime/  compiling, agreeing over ranks, peer memory, the start of a step
    models/   one folder a model: its builds, kernels and runner
    aot.py    the command line that builds a deployment's kernels ahead of time

`plan` and `device` know nothing of `runtime`, and none of the three knows a model. Every launch
goes through `aiter.ops.flydsl.kernels.tensor_shim._run_compiled`.
"""
