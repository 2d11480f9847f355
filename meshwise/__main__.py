"""``python -m meshwise``, so that ``torchrun -m meshwise`` works; the command ``meshwise`` too."""

from meshwise import signals


def main() -> None:
    """The program. Whatever signal ends it from here on, it says so in one line."""
    signals.quit_at_once()
    from meshwise.cli import app

    app.main()


if __name__ == "__main__":
    main()
