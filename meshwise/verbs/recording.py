"""A verb's run directory: what its ranks measure, and how they ended.

Under torchrun or srun every rank runs the verb. Only rank 0 writes and prints, and all ranks use
rank 0's request.
"""

import contextlib
import functools
import logging
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from meshwise import signals
from meshwise.launcher import Job
from meshwise.text import masked_words

if TYPE_CHECKING:
    from meshwise.spec import Case, Cluster, Plan, Sample

log = logging.getLogger("meshwise")


def command(verb: str) -> tuple[str, ...]:
    """Return the words that the user typed, with credentials masked; in Python, the verb's name."""
    program = Path(sys.argv[0])
    typed = program.name == "meshwise" or program.parts[-2:] == ("meshwise", "__main__.py")
    return ("meshwise", *masked_words(sys.argv[1:])) if typed else (f"meshwise.{verb}(...)",)


@dataclass(frozen=True)
class Recording:
    """A run directory, and the job that measures into it. Of its ranks only the one that leads
    writes; others may not even see ``path``."""

    path: Path
    job: Job

    @classmethod
    def begin(
        cls,
        runs: Path | str,
        verb: str,
        slug: str,
        cluster: "Cluster",
        size: int,
        plan: "Plan | None" = None,
        **facts: object,
    ) -> "Recording":
        """Make the run directory, with ``facts`` in its provenance."""
        job = Job.here()
        if not job.leads:
            return cls(Path(runs), job)
        from meshwise import provenance, store

        collected = provenance.collect(nproc=size) | facts
        with signals.held():
            run_dir = store.create(
                runs,
                verb=verb,
                slug=slug,
                cluster=cluster,
                world_size=size,
                command=command(verb),
                provenance=collected,
                plan=plan,
            )
            signals.last_acts.append(functools.partial(_close, run_dir))
        return cls(run_dir, job)

    @property
    def leads(self) -> bool:
        return self.job.leads

    def samples(self) -> "dict[str, Sample]":
        """Return the samples so far by case; none on a rank without access to the run directory."""
        from meshwise.verbs import files

        if not self.leads and not (self.path / "run.json").exists():
            return {}
        return {sample.case_id: sample for sample in files.load(self.path)[1]}

    def append_failed(
        self,
        case: "Case",
        status: Literal["skipped", "hung", "error"],
        reason: str,
        **metrics: float,
    ) -> None:
        """Append a sample without times."""
        from meshwise import store
        from meshwise.spec import Sample

        if self.leads:
            sample = Sample(
                case_id=case.id, case=case, status=status, reason=reason, metrics={**metrics}
            )
            store.append(self.path, sample)

    def finish(self) -> None:
        """Record in run.json how the run ended, as its samples tell."""
        from meshwise import store
        from meshwise.spec import ending

        if self.leads:
            info, found, _ = store.load(self.path)
            if (info.status, info.reason) != ending(found):
                store.finish(self.path, *ending(found))

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the run while the body runs. Raise ValueError if another process writes to it."""
        if not self.leads:
            yield
            return
        from meshwise import files

        path = self.path / "samples.jsonl"
        try:
            lock, is_held = files.lock(path)
        except BlockingIOError:
            raise ValueError(
                f"another process measures into {self.path}; wait for its end, or start a new run "
                "without --resume"
            ) from None
        except OSError as error:
            raise ValueError(f"{path} cannot be written: {error.strerror}") from None
        try:
            if not is_held:
                log.warning("%s cannot be locked: its file system has no locks", self.path)
            yield
        finally:
            os.close(lock)

    @contextlib.contextmanager
    def watched(self, kept: str) -> Iterator[None]:
        """Record in run.json how the ranks ended; ``kept`` is added to a signal's error.

        torchrun sends SIGTERM if another rank failed. An error already raised here may
        say which one.
        """
        try:
            with signals.raised(unless_failing=self.job.launched):
                yield
        except BaseException as error:
            if not self.leads:
                raise
            from meshwise import store

            outside = {
                KeyboardInterrupt: signals.describe(signal.SIGINT),
                SystemExit: "ended from outside",
            }
            reason = str(error) if isinstance(error, signals.Ended) else outside.get(type(error))
            status = "interrupted" if reason else "failed"
            with contextlib.suppress(OSError, ValueError):  # folder gone: error says more
                store.finish(self.path, status, reason or str(error) or repr(error))
            if isinstance(error, KeyboardInterrupt):
                raise KeyboardInterrupt(kept) from None
            if isinstance(error, signals.Ended):
                raise signals.Ended(error.number, kept) from None
            raise


def _close(run_dir: Path, reason: str) -> None:
    """Record that a run was interrupted, if the program quits while it is running."""
    from meshwise import store
    from meshwise.spec import RunInfo

    if store.read(run_dir / "run.json", RunInfo).status == "running":
        store.finish(run_dir, "interrupted", reason)
