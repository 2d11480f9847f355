"""``meshwise refit``."""

import meshwise
from meshwise.cli.options import Json


def refit(*, json: Json = False) -> int:
    """Move live weights from one layout to another. Not built yet."""
    meshwise.refit(json=json)
