"""`python -m samerun.cli`: the command, for where its script is not on the path."""

from samerun.cli.main import main

if __name__ == "__main__":
    main()
