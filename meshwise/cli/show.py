"""``meshwise show``: files of ours, or a pattern of attention."""

import inspect
from typing import Literal

import cyclopts
from cyclopts import Parameter

import meshwise
from meshwise.cli.flags import as_typed
from meshwise.cli.options import Json, Numbers
from meshwise.cli.output import DONE, SOME_FAILED, emit

show = cyclopts.App(
    name="show",
    help="Print any of our files readably, or (show pattern) what a pattern of attention covers "
    "and costs.",
    result_action="return_value",
    default_parameter=Parameter(negative=()),
)


@show.default
def file(
    path: str, *, node: str | None = None, costs: str = "costs.json", json: Json = False
) -> int:
    """Print any of our files readably.

    Parameters
    ----------
    path
        cluster.toml, costs.json, plan.json; a run: its directory, run.json or samples.jsonl; its
        phases.json or nccl_check.json; a checkpoint's folder, all of which is verified (exit code
        4 if any of it is damaged), or its checkpoint.json alone.
    node
        Of a plan: follow this operation of the model, as layers.0.up, to its price and its share.
    costs
        With --node: the prices that the plan was made from.
    """
    if node is not None:
        from meshwise.verbs.show import follow, followed

        tasks = follow(path, node, costs)
        emit(tasks, [followed(tasks)], json)
        return DONE
    record = meshwise.show(path)
    from meshwise.pages import show as pages

    emit(record, pages.of(record), json)
    return SOME_FAILED if getattr(record, "damage", ()) else DONE


@show.command(sort_key=0)
def pattern(
    *,
    segment_lengths: Numbers = (),
    dilation_rates: Numbers = (),
    seq_len: int = 65536,
    heads: int = 12,
    kv_heads: int | None = None,
    head_dim: int = 64,
    batch: int = 1,
    dtype: Literal["fp32", "bf16", "fp16"] = "bf16",
    offsets: Literal["mod", "block", "group"] = "mod",
    offset_heads: Literal["query", "kv"] = "query",
    causal: bool = False,
    window: int | None = None,
    zigzag: bool = False,
    ranks: int = 8,
    figure: str | None = None,
    json: Json = False,
) -> int:
    """What a pattern of attention covers, costs and moves, before any GPU is touched.

    Dilated as LongNet's where --segment-lengths and --dilation-rates are given, else dense.

    Parameters
    ----------
    segment_lengths
        Of each branch, as 2048,4096,8192.
    dilation_rates
        Of each branch, as 1,2,4.
    seq_len
        Tokens in all.
    heads
        Of queries.
    kv_heads
        Of keys and values; by default as many.
    head_dim
        Width of a head.
    batch
        Sequences.
    dtype
        Of queries, keys and values.
    offsets
        Which rows a head keeps: head mod rate (LongNet), blocks of heads (torchscale), or each
        branch its own group of heads.
    offset_heads
        Whether query heads or key-value heads are counted for that.
    causal
        A query sees keys up to itself.
    window
        Of dense causal attention: keys a query sees at most.
    zigzag
        Of dense attention: rank r holds chunks r and 2n-1-r of 2n.
    ranks
        That share the sequence.
    figure
        Draw who attends whom into this SVG file.
    """
    from meshwise.pages import pattern as page
    from meshwise.verbs import show as verb

    with as_typed(inspect.signature(pattern).parameters):
        found = verb.pattern(
            segment_lengths=segment_lengths, dilation_rates=dilation_rates,
            seq_len=seq_len, heads=heads, kv_heads=kv_heads, head_dim=head_dim, batch=batch,
            dtype=dtype, offsets=offsets, offset_heads=offset_heads, causal=causal, window=window,
            zigzag=zigzag, ranks=ranks, figure=figure,
        )  # fmt: skip
    emit(found, page.of(found), json)
    return DONE
