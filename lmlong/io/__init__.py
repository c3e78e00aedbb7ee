"""Files and folders: written atomically, verified by digest, and built by one process at a time."""
