"""Learning while reading by C++, on a CPU."""
