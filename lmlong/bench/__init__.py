"""What attentions are worth, measured: against each other, and against what they approximate."""
