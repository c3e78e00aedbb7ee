"""Files and folders that are whole or not there, known by their digests, and made by one process at a time."""
