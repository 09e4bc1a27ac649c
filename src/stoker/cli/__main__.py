"""`python -m stoker.cli`: the same as `stoker`."""

from stoker.cli import main

if __name__ == "__main__":
    main()
