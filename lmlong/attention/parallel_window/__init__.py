"""A recurrence and a softmax window in one layer."""
