"""The causal scan by code in C++ that is compiled for this machine's processor when it is first needed."""
