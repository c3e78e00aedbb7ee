"""The linear attention scan in C++, compiled for this machine's processor when it is first needed."""

from lmlong.attention.linear.native.kernel import scan

__all__ = ["scan"]
