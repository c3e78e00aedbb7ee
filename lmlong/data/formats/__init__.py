"""File formats. `table.py` lists them: for each suffix, how its files are read and what a folder does with them."""
