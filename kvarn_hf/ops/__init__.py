"""What can be done with a layer's state, on any device. Nothing else imports :mod:`kvarn_kernels`."""

from kvarn_hf.ops.commit import commit, left_padding
from kvarn_hf.ops.dispatch import (
    MOST_QUERY_TOKENS,
    attend,
    can_attend,
    dense,
    held,
    imbalance_trace,
    key_prescale,
    quantize,
    scheme,
    uses_kernels,
)
from kvarn_hf.ops.plain import repeat_counted

__all__ = [
    "MOST_QUERY_TOKENS",
    "attend",
    "can_attend",
    "commit",
    "dense",
    "held",
    "imbalance_trace",
    "key_prescale",
    "left_padding",
    "quantize",
    "repeat_counted",
    "scheme",
    "uses_kernels",
]
