"""Files and folders: written whole or not at all, verified by their digests, and made by one process at a time."""
