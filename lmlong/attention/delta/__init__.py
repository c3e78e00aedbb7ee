"""The delta rule: linear attention that can replace the value stored under a key."""
