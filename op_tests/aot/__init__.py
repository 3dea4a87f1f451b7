"""Tests of the ahead-of-time build. None needs a GPU."""
