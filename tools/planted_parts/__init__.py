"""Logs with planted anomalies and sequences with planted repeats, and what models make of them."""
