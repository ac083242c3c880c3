"""KL divergence from the dense cache, as users import it; :mod:`kvarn_hf.evaluation.pseudo_decode` computes it."""

from kvarn_hf.evaluation.pseudo_decode import (
    BLOCK,
    HISTORIES,
    SKIP,
    DenseReference,
    PseudoDecodeResult,
    dense_reference,
    pseudo_decode,
)

__all__ = ["BLOCK", "HISTORIES", "SKIP", "DenseReference", "PseudoDecodeResult", "dense_reference", "pseudo_decode"]
