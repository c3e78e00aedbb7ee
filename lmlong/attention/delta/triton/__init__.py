"""The recurrence over the chunks of the delta rule as a Triton kernel, for NVIDIA GPUs; torch computes all else.

Triton is imported only when the scan is loaded.
"""

from functools import partial

from lmlong.attention import scan as spans
from lmlong.attention.delta.chunk import ChunkKernel, Scan


def load_scan() -> Scan:
    """Return the scan by the Triton kernel."""
    from lmlong.attention.delta.triton.recurrence import recurrence

    return partial(spans.scan, ChunkKernel(recurrence))
