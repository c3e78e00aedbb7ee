"""Models trained in order to be compared."""
