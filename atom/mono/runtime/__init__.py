"""From builders to launches: what every model's runner is made of.

abi          names of a launcher's parameters, and arguments in their order
compile      compiling without dispatch, tracing, and what the binaries take
widths       one build a width, agreed on by all ranks
consensus    agreement of ranks; MonoUnsupported, the one signal of a refusal
route        a runner made on the first step that wants one, never during a capture
lifecycle    peer memory that lives as long as its owner
peer_memory  one buffer a rank, which every other rank can address
mailboxes    zeroed and fenced memory for one step after another
step_begin   the launch that zeroes and fences it
stream       the stream and the device that launches go to
deployment   reasons why a deployment cannot run mono kernels
debug        who is missing when a wait was given up
timeline     when the workgroups of a step entered each stage
compare      whether the ranks' results are one
"""
