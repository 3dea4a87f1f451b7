"""Host-visible operators. ``enum`` is plain Python; the rest import torch.

Import the submodule you need; this package re-exports nothing, so that it stays cheap.
"""
