"""The layer kernels: each composes the stages of `atom.mono.device` for one build key."""
