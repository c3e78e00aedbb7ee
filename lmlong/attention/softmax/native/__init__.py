"""The native decode step of this attention."""
