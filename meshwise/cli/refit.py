"""``meshwise refit``."""

import meshwise


def refit() -> int:
    """Move live weights from one layout to another. Not built yet."""
    meshwise.refit()
