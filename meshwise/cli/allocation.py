"""``meshwise --launcher NAME ... VERB ...``: a command that runs on a part of a cluster."""

import importlib
from collections.abc import Callable
from inspect import BoundArguments
from os.path import exists
from typing import Annotated, Any

import cyclopts
from cyclopts import Parameter

from meshwise.cli.options import PLAIN, flags, whole_numbers
from meshwise.cli.output import DONE, emit
from meshwise.options.allocation import Allocation, belongs

FLAG, HERE = "--launcher", Allocation()
_NO_PLAN = ("model", "sweep", "list_suites")  # a run that has one of these has no plan
_DRY = "Only print what would be submitted, or on Ray which hosts would be taken."
_Parse = Callable[[list[str]], tuple[Any, BoundArguments, dict[str, Any]]]


def named_in(words: list[str]) -> bool:
    """Return whether a command line says who starts its ranks."""
    return any(word.partition("=")[0] == FLAG for word in words)


def astray(flag: str) -> str:
    """Say to which launcher an unknown ``--flag`` belongs; "" if to none."""
    name = flag.partition("=")[0].removeprefix("--").replace("-", "_")
    is_ours = name in Allocation.__dataclass_fields__
    return f"{flag}: {belongs(name)}; give that, or leave it out" if is_ours else ""


def start(words: list[str], parse: _Parse) -> int:
    """Split the command line into place and command, and start it there. ``parse``: raises an error
    if the command's own words are wrong."""
    app = cyclopts.App(
        name="meshwise",
        help=start_here.__doc__,
        help_format="plaintext",
        config=(whole_numbers,),
        default_parameter=PLAIN,
        exit_on_error=False,
        print_error=False,
        suppress_keyboard_interrupt=False,
        result_action="return_value",
    )
    app.default(start_here)
    command, bound, own = app.parse_args(words)
    return int(command(*bound.args, **bound.kwargs, **dict.fromkeys(own, parse)) or 0)


def start_here(
    *command: Annotated[str, Parameter(allow_leading_hyphen=True)],
    place: Annotated[Allocation, flags(Allocation)] = HERE,
    dry_run: Annotated[bool, Parameter(help=_DRY)] = False,
    parse: Annotated[_Parse, Parameter(parse=False)],
) -> int:
    """Run detect, measure, run or refit on a part of a cluster: the command as it is on one
    machine, with --launcher and the options below anywhere in it."""
    from meshwise.launch.errand import Errand
    from meshwise.launch.ray_hosts import sized
    from meshwise.launch.slurm_script import swept

    errand = Errand(command, dry_run or place.launcher == "kubernetes")
    taken = sized(errand, place, False) if place.launcher == "ray" else place
    flag, values = ("", [""]) if place.array is None else swept(place.array)
    if flag.replace("-", "_") in Allocation.__dataclass_fields__:
        raise ValueError(f"array = {place.array!r}: --{flag} is the launcher's own; give one value")
    if flag and errand.value(flag) is not None:
        raise ValueError(f"array = {place.array!r}: the command has --{flag}, too; leave one out")
    for value in values:
        _, bound, _ = parse([*command, f"--{flag}={value}"] if flag else [*command])
        _look_up(errand.verb, bound.arguments.get("asked"), taken)
    engine = importlib.import_module(f"meshwise.launch.{place.launcher}")
    sizes = {"nodes", "gpus_per_node", "nproc_per_node"}
    if place.launcher == "ray" and errand.verb == "detect" and not place.said().keys() & sizes:
        return _listed(
            [host._asdict() for host in engine.hosts(errand, place)], "--json" in command
        )
    return int(engine.start(errand, place))


def _look_up(verb: str, asked: Any, place: Allocation) -> None:
    """Find the command's models, its plan and its cases of a suite, and check that they are for the
    ranks that there will be. A ValueError names what is wrong. A container may have other files
    than this host: what is not here is not looked up then."""
    from meshwise.launch.errand import image
    from meshwise.models import catalogue

    is_inside = image(place) is not None
    models = () if is_inside else getattr(asked, "model", None) or ()
    for model in (models,) if isinstance(models, str) else models:
        catalogue.find_any(model)
    if verb != "run":
        return
    if (suite := getattr(asked, "suite", None)) is not None:
        from meshwise.verbs.suite import chosen

        chosen(suite, place.num_ranks, asked)
    elif not any(getattr(asked, name, None) for name in _NO_PLAN):
        from meshwise.spec import Plan
        from meshwise.verbs import files
        from meshwise.verbs.run import DEFAULT_PLAN

        path = getattr(asked, "plan", None) or DEFAULT_PLAN
        if is_inside and not exists(path):
            return
        size = files.take(path, Plan).layout.num_devices
        if size != place.num_ranks:
            raise ValueError(
                f"{path} is for {size} ranks, and --nodes {place.nodes} x {place.ranks_per_node} "
                f"ranks of each is {place.num_ranks}; make these equal, or plan anew with --gpus "
                f"{place.num_ranks}"
            )


def _listed(hosts: list[dict[str, Any]], json: bool) -> int:
    """Print the nodes of a cluster."""
    from meshwise.pages.table import columns, listed

    shown: dict[str, Any] = {
        "address": "address",
        "host": "name",
        "node": lambda host: host["node"][:8],
    }
    numbers = {"CPUs": "cpus", "free": "free_cpus", "GPUs": "gpus", "free GPUs": "free_gpus"}
    heads = columns(str, shown) + columns(str, numbers)
    emit({"hosts": hosts}, [listed("Nodes of the cluster", hosts, *heads, left=3)], json)
    return DONE
