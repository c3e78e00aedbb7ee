"""Linear attention, with the state S and z: by definition, in chunks, in C++ and in Triton."""
