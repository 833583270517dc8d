"""`python -m kvctl`."""

from kvctl.cli.main import main

if __name__ == "__main__":
    main()
