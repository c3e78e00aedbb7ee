"""Linear attention, whose state S and z each token adds to: as a formula, in chunks, in C++ and in Triton."""
