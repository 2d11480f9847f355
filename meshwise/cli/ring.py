"""``meshwise measure ring``: the benchmark of RingDilatedAttentionV2Collective with its flags, and
more."""

from dataclasses import replace
from typing import Annotated, Any

from cyclopts import Parameter

from meshwise.cli.options import ANY, Json, Size, flags
from meshwise.cli.output import DONE, code_of, emit, on_rank_0
from meshwise.options.ring import RingOptions
from meshwise.verbs import world

CHECK_FAILED = 1
USUAL = RingOptions()


def ring(
    ranks: int | None = None,
    /,
    *,
    asked: Annotated[RingOptions, flags(RingOptions, lists=True)] = USUAL,
    all_: Annotated[bool, Parameter(name="--all")] = False,
    quick: bool = False,
    large: bool = False,
    no_flash_attention: bool = False,
    verify: bool = False,
    size: Size = ANY,
    json: Json = False,
) -> int:
    """Ring and dilated attention over rings of GPUs: time, scaling, memory, bytes.

    Also read from the environment: BATCH_SIZE, SEQ_LENGTHS, NUM_HEADS, EMBED_DIM, WARMUP_RUNS,
    BENCHMARK_RUNS and OUTPUT_DIR; options win. Exit code 4 if a case failed.

    Parameters
    ----------
    ranks
        The same as --nproc.
    all_
        Run each ring size by itself, on as many ranks as the ring has.
    quick
        8192 and 16384 tokens, 1 warm-up, 3 iterations.
    large
        131072 and 262144 tokens, batch 1, on 4 GPUs unless said otherwise.
    no_flash_attention
        Use another kernel than flash attention.
    verify
        Time nothing; check against the definition: exit code 1 if anything is wrong.
    """
    from meshwise.verbs import ring as verb

    modes = [name for name, on in (("all", all_), ("quick", quick), ("large", large)) if on]
    if len(modes) > 1:
        raise ValueError(f"--{' and --'.join(modes)}: give one of them")
    if verify and asked.dry_run:
        raise ValueError("--dry-run and --verify: give one of them")
    asked = replace(
        asked,
        mode=modes[0] if modes else "",  # type: ignore[arg-type]
        nproc=world.num_ranks(nproc=size.ranks, gpus=ranks),
        use_flash_attention=not no_flash_attention,
    )
    what = verb.asked(asked)
    if asked.dry_run:
        return _forecast(what, json)
    if verify:
        return _verify(what, json)
    found = verb.measure_ring(what)
    return _results(found, json)


def _forecast(what: Any, json: bool) -> int:
    import msgspec

    from meshwise.pages import scaling
    from meshwise.verbs.ring import forecast

    found = forecast(what)
    config = msgspec.to_builtins(what.chosen)
    emit(found, scaling.dry_run(config, found), json)
    return DONE


def _verify(what: Any, json: bool) -> int:
    from meshwise.pages import ring as page
    from meshwise.verbs.ring import verify_ring

    found, notes = verify_ring(what)
    emit({"checks": found, "notes": notes}, page.checks(found, notes), json)
    return CHECK_FAILED if any(one["passed"] is False for one in found) else DONE


@on_rank_0
def _results(found: Any, json: bool) -> int:
    from meshwise.pages import scaling
    from meshwise.pages.table import Table

    places = [str(path) for path in (found.run_dir, *found.files) if path is not None]
    written = [Table("Written", ("",), tuple((place,) for place in places))] if places else []
    emit(found.document, [*scaling.of_run(found.document), *written], json)
    return code_of(row["status"] for row in found.document["results"])
