"""C++ code, compiled at first use for this machine's processor."""
