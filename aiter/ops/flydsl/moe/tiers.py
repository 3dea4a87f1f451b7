"""Which tuned row serves how many tokens."""

from __future__ import annotations

# From the first tier on rows are tuned at the tiers only.
TIERS = (32768, 131072)
# A sorted id holds a token in 24 bits, and the first number beyond the last marks padding.
MAX_TOKENS = (1 << 24) - 1


def get_padded_M(M: int) -> int:
    """The token count whose tuned row serves `M` tokens.

    The next power of two below 32768, then 32768 up to 131071 and 131072 from there on.
    """
    if TIERS[1] <= M:
        return TIERS[1]
    if TIERS[0] <= M:
        return TIERS[0]
    return 1 << (M - 1).bit_length() if M > 1 else 1


def served_range(
    token: int, cap: int = MAX_TOKENS, highest: bool = False
) -> tuple[int, int] | None:
    """(lowest, highest) M from 1 up to `cap` that the row tuned at `token` serves.

    highest: the tables have no row of its key at a higher tier, whose M then fall to a row of
    the tier below. None for a row that no M reaches: its token is no value of `get_padded_M`, or
    all of its range lies beyond `cap`.
    """
    if token < 1 or get_padded_M(token) != token:
        return None
    low = TIERS[1] if token == TIERS[1] else token // 2 + 1
    high = {TIERS[0]: cap if highest else TIERS[1] - 1, TIERS[1]: cap}.get(token, token)
    return (low, min(high, cap)) if low <= cap else None
