"""The short convolution as a kind of its own."""
