"""`python -m lmlong` is the command `lmlong`."""

from lmlong.cli.main import main

if __name__ == "__main__":
    main()
