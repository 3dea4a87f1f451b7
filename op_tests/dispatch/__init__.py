"""`tensor_shim._run_compiled` against the recording driver: what is launched, when, with what."""
