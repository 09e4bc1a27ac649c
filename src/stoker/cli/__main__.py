"""`python -m stoker.cli` does the same as `stoker`."""

from stoker.cli.main import main

if __name__ == "__main__":
    main()
