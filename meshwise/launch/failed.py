"""The error that the process which started a job gets when the job failed."""


class RanksFailed(RuntimeError):
    """The error of a job that ended because of ``rank``. ``details``: its traceback, if any."""

    def __init__(self, message: str, rank: int | None = None, details: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.details = details

    @property
    def hung(self) -> bool:
        """Whether a rank did not arrive, and none died or raised an error of its own."""
        return any(words in str(self) for words in ("had not arrived", "had stopped"))
