"""Memory that is free in this process, given back to the system."""

import ctypes


def give_back() -> None:
    """Give back what states that ended have left to malloc, which would keep gigabytes of it for later; where the C
    library can, as on Linux."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return
    trim(0)
