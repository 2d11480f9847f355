"""``meshwise show``: print one of our files, or an attention pattern."""

from typing import Annotated, Literal

import cyclopts
from cyclopts import Parameter

import meshwise
from meshwise.cli.options import PLAIN, Json, flags
from meshwise.cli.output import DONE, SOME_FAILED, emit, say
from meshwise.options.price import PriceOptions
from meshwise.options.ring import Pattern

USUAL, USUAL_PRICE = Pattern(), PriceOptions()
Flags = Annotated[Pattern, flags(Pattern, lists=True)]

show = cyclopts.App(
    name="show",
    help="Print any file that Meshwise writes as tables; what an operation costs (show price); "
    "what a pattern of attention covers and costs (show pattern).",
    result_action="return_value",
    default_parameter=PLAIN,
)


@show.default
def file(
    path: str,
    *,
    node: str | None = None,
    costs: str = "costs.json",
    as_: Annotated[Literal["megatron", "torchtitan"] | None, Parameter(name="--as")] = None,
    json: Json = False,
) -> int:
    """Print any file that Meshwise writes as tables.

    Parameters
    ----------
    path
        cluster.toml, costs.json, plan.json; a run: its directory, run.json, samples.jsonl or
        steps.jsonl; its phases.json or nccl_check.json; a checkpoint's folder, all of which is
        verified (exit code 4 if any of it is damaged), or its checkpoint.json alone; a model's
        config.json. Or a name: of a cluster that comes along, as h100-hgx, or of a model.
    node
        For a plan: follow this operation of the model, as layers.0.up, to its price and its share.
    costs
        With --node: the prices that the plan was made from.
    as_
        For a plan: print it as Megatron-LM's flags or as torchtitan's job file. What these do not
        say is told in comments and on standard error.
    """
    if as_ is not None:
        from meshwise.verbs.configured import config

        text, notes = config(path, as_)
        if json:
            emit({"text": text, "not_said": notes}, [], json)
        else:
            say(*text.splitlines())
        return DONE
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
    *, asked: Annotated[Pattern, flags(Pattern, lists=True)] = USUAL, json: Json = False
) -> int:
    """Say what an attention pattern covers, costs and moves, without using a GPU.

    Dilated as in LongNet if --segment-lengths and --dilation-rates are given, else dense.
    """
    from meshwise.pages import pattern as page
    from meshwise.verbs import show as verb

    found = verb.pattern(asked)
    emit(found, page.of(found), json)
    return DONE


@show.command(sort_key=0)
def price(
    asked: Annotated[PriceOptions, flags(PriceOptions)] = USUAL_PRICE, *, json: Json = False
) -> int:
    """Say what an operation costs, how sure that is, and what it rests on.

    For example: show price all_reduce 64MiB --group 4; show price gemm 4096,4096,4096; show price
    layer --model gpt-2.6b --tp 2; show price unit --model gpt-2.6b --group 8 --cluster h100-hgx.
    """
    from meshwise.pages import show as pages
    from meshwise.verbs import price as verb

    found = verb.price(asked)
    emit(found, [pages.price(found)], json)
    return DONE
