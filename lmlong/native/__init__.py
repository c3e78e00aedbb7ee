"""C++ code, compiled for the processor of the machine when it is first needed."""
