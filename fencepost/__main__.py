"""``python -m fencepost``."""

from fencepost.cli import main

if __name__ == "__main__":
    main()
