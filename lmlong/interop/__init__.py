"""Models of others, in the formats of others."""
