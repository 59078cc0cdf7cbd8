"""`python -m lookonce`: the command line."""

from lookonce.cli.main import main

if __name__ == "__main__":
    main()
