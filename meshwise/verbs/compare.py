"""compare: two runs in, the ratio of every case they share and the verdict out."""

import shlex
from pathlib import Path

from meshwise.pages import compare as pages
from meshwise.pages.compare import Comparison
from meshwise.spec import RunInfo, Sample, Step
from meshwise.verbs import files

FEW_STEPS = 20
# Saving again would replace what was saved, --resume-from would then find another step.
_LEFT_OUT = ("--steps", "--save", "--save-every")


def compare(
    a: Path | str, b: Path | str, *, fail_if: str | None = None, force: bool = False
) -> Comparison:
    """Is run ``b`` faster than run ``a``? Both are run directories or their samples.jsonl.

    ``fail_if``: ``slower>5%`` or ``faster>5%``; the cases it caught are in ``failed``. Samples of
    different timing methods or regimes are refused unless ``force``. Two layouts of one model,
    workload, dtype and cluster are compared step by step.
    """
    (info_a, samples_a), (info_b, samples_b) = _load(a), _load(b)
    return pages.compare(
        (str(a), samples_a),
        (str(b), samples_b),
        fail_if=fail_if,
        force=force,
        layouts=info_a.cluster == info_b.cluster,
        again=tuple(
            dict.fromkeys(filter(None, map(again, (info_a, info_b), (samples_a, samples_b))))
        ),
    )


def again(info: RunInfo, samples: list[Sample]) -> str:
    """The command that made a run, with more steps; empty where it was none, or means otherwise."""
    done = [sample for sample in samples if isinstance(sample.case.op, Step) and sample.times_s]
    odd = ("--suite", "--sweep", "--profile-driver-time", "--rivals")
    names = {word.split("=")[0] for word in info.command}
    if info.command[:2] != ("meshwise", "run") or not done or names & set(odd):
        return ""
    op, count = done[0].case.op, len(done[0].times_s)
    assert isinstance(op, Step)
    decodes = op.mode == "decode"
    flag, more = ("--new-tokens", 2 * op.new_tokens) if decodes else ("--steps", 2 * count)
    words, left_out = [], (*_LEFT_OUT, flag)
    for before, word in zip(("", *info.command), info.command, strict=False):
        if word.split("=")[0] not in left_out and before not in left_out:
            words.append(word)
    return shlex.join([*words, flag, str(max(FEW_STEPS, more))])


def _load(path: Path | str) -> tuple[RunInfo, list[Sample]]:
    run_dir = Path(path).parent if Path(path).name == "samples.jsonl" else Path(path)
    if not (run_dir / "run.json").exists():
        raise ValueError(f"{path} is not a run directory; give runs/<id>")
    return files.load(run_dir)
