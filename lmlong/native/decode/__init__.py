"""The decode step of a model in C++, for a CPU."""
