"""The C++ decode step of a model on a CPU."""
