"""The command ``meshwise``, also as ``python -m meshwise`` and so ``torchrun -m meshwise``."""

from meshwise import signals


def main() -> None:
    """Run the program. From here on, any signal that ends it is reported in one line."""
    signals.quit_at_once()
    from meshwise.cli import app

    app.main()


if __name__ == "__main__":
    main()
