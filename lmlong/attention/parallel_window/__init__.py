"""A recurrence and a window of softmax attention in one layer."""
