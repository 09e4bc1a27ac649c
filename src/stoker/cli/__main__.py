"""`python -m stoker.cli` does the same as `stoker`."""

from stoker.cli import main

if __name__ == "__main__":
    main()
