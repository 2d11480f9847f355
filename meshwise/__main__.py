"""``python -m meshwise``, so that ``torchrun -m meshwise`` works."""

from meshwise.cli.app import main

if __name__ == "__main__":
    main()
