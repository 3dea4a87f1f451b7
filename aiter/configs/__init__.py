"""The tuned tables this project ships, as CSV, and `write_tables`, which wrote them.

From outside the tables are found through `aiter.jit.core.AITER_CONFIGS`.
"""
