"""The step of a model in C++, for a CPU."""
