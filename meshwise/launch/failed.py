"""The error that the process which started a job gets when the job failed."""


class RanksFailed(RuntimeError):
    """A job ended because of ``rank``; ``details`` is that rank's traceback, if it wrote one."""

    def __init__(self, message: str, rank: int | None = None, details: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.details = details

    @property
    def hung(self) -> bool:
        """Whether a rank stayed away, and none died or raised an error of its own."""
        return any(words in str(self) for words in ("had not arrived", "had stopped"))
