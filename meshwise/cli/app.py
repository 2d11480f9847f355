"""``meshwise VERB ...``: load the verb's module when it is called, turn errors into one line.

Exit codes: 0 done, 2 bad input, 3 a comparison gate failed, 4 some cases failed or ranks died,
130 interrupted, 143, 129 or 138 ended by SIGTERM, SIGHUP or SIGUSR1.
"""

import difflib
import gc
import json
import logging
import os
import sys
from os.path import exists
from typing import NoReturn, get_args, get_origin

import cyclopts

import meshwise
from meshwise import signals
from meshwise.cli import allocation
from meshwise.cli.options import PLAIN, whole_numbers
from meshwise.cli.output import BAD_INPUT, DONE, INTERRUPTED, SOME_FAILED
from meshwise.launcher import Job
from meshwise.options import Shape
from meshwise.text import masked, one_line, plain

_HELP = """Measure a GPU cluster, price it, plan a model's layout, run it, compare.

Each verb takes the files of the one before from the working directory and says which it took.
On a cluster detect, measure, run and refit take --launcher slurm, ray or kubernetes; meshwise \
--launcher slurm --help lists what goes with it.
Exit codes: 0 done, 2 bad input, 3 compare found what --fail-if names, 4 cases failed or ranks \
died, 130 interrupted, 143, 129 or 138 ended by SIGTERM, SIGHUP or SIGUSR1.
"""

_VERBS = {
    "detect": "Look at this machine; writes cluster.toml.",
    "measure": "Time operations on every rank; writes a run directory. By default: profile.",
    "calibrate": "Turn measurements into prices; writes costs.json.",
    "plan": "Find the fastest layout that fits; writes plan.json.",
    "run": "Execute a plan: predicted beside measured; writes a run directory.",
    "refit": "Move weights between layouts: how fast, bounded by what, checked.",
    "compare": "Compare launches: ratio, interval, verdict; or follow them over time.",
    "report": "Write all of it as one self-contained page.",
    "show": "Print any file that Meshwise writes as tables.",
}
_MODULES = ("measure", "run", "refit", "compare", "show")  # the other verbs share ``verbs``


def _app() -> cyclopts.App:
    app = cyclopts.App(
        name="meshwise",
        help=_HELP,
        help_format="plaintext",
        version=lambda: meshwise.__version__,
        config=(_commas, whole_numbers, _megatrons),
        default_parameter=PLAIN,
        exit_on_error=False,
        print_error=False,
        suppress_keyboard_interrupt=False,
        result_action="return_value",
    )
    app.register_install_completion_command(help="Install completion for your shell.")
    for number, (verb, says) in enumerate(_VERBS.items()):
        module = verb if verb in _MODULES else "verbs"
        app.command(f"meshwise.cli.{module}:{verb}", name=verb, help=says, sort_key=number)
    return app


def _commas(_: cyclopts.App, __: object, arguments: cyclopts.ArgumentCollection) -> None:
    """Split 128,256 into 128 256 in every list, except a shape, JSON, the name of an existing file
    and words that are another program's."""
    for argument in (one for one in arguments if not one.parameter.allow_leading_hyphen):
        kinds = get_args(argument.hint)
        if get_origin(argument.hint) is tuple and bool not in kinds and Shape not in kinds:
            argument.tokens[:] = [
                token.evolve(value=part)
                for token in argument.tokens
                for part in _parts(token.value)
            ]
            for token in argument.tokens:
                if not token.value:
                    raise cyclopts.CoercionError("a place in the list is empty", token=token)


def _megatrons(
    _: cyclopts.App, verb: tuple[str, ...], arguments: cyclopts.ArgumentCollection
) -> None:
    """Refuse words after ``refit`` that are neither its flags nor Megatron's, before it starts."""
    if verb == ("refit",):
        from meshwise.cli import refit

        rest = (argument for argument in arguments if argument.parameter.allow_leading_hyphen)
        refit.megatrons([token.value for argument in rest for token in argument.tokens])


def _parts(value: str) -> list[str]:
    whole = value.lstrip().startswith("{") or exists(value)
    return [value] if whole else [part.strip() for part in value.split(",")]


def main(arguments: list[str] | None = None) -> NoReturn:
    """Parse, do, exit. Unfrozen objects are searched for cycles at exit, for half a second."""
    _log_to_stderr()
    code, said = _done(arguments)
    if said:
        begin = "error: " if code in (BAD_INPUT, SOME_FAILED) else ""
        print(f"{begin}{one_line(said)}", file=sys.stderr)
    asked_json = "--json" in (sys.argv if arguments is None else arguments)
    if said and asked_json and Job.here().leads:
        print(json.dumps({"error": one_line(said), "exit_code": code}))
    gc.freeze()
    sys.exit(code)


def _done(arguments: list[str] | None) -> tuple[int, str]:
    """Run one verb; return the exit code and a message. A user's mistake gives a message and no
    traceback."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        return (
            allocation.start(words, _app().parse_args)
            if allocation.named_in(words)
            else _app()(arguments)
        ) or DONE, ""
    except cyclopts.CycloptsError as error:
        return BAD_INPUT, _in_words(error)
    except KeyboardInterrupt as stop:
        return INTERRUPTED, "; ".join(filter(None, ["interrupted", str(stop)]))
    except signals.Ended as stop:
        return 128 + stop.number, str(stop)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return BAD_INPUT, "this verb needs PyTorch; pip install 'meshwise[torch]'"
    except RuntimeError as error:
        from meshwise.launch import RanksFailed

        if not isinstance(error, RanksFailed):
            raise
        return SOME_FAILED, str(error)
    except (ValueError, OSError) as error:
        from meshwise.cli.flags import as_typed

        return BAD_INPUT, as_typed(str(error), words)


def _in_words(error: cyclopts.CycloptsError) -> str:
    """Word a parser's error like our own errors; an unknown name gets the nearest known one."""
    if isinstance(error, cyclopts.UnusedCliTokensError):
        from meshwise.options.measure import KINDS

        words = " ".join(error.unused_tokens or ())
        known = [*KINDS, "ring", "import"] if error.command_chain == ("measure",) else []
        return f"{words}: not understood here{_nearest(words, known)}; --help lists what is"
    if isinstance(error, cyclopts.UnknownOptionError) and (
        astray := allocation.astray(error.token.keyword or error.token.value)
    ):
        return astray
    if isinstance(error, cyclopts.CoercionError) and error.token and error.msg is None:
        wanted = {int: "a whole number", float: "a number"}.get(error.target_type or str)
        if wanted:
            return f"{error.token.keyword} = {error.token.value!r}: must be {wanted}"
    if isinstance(error, cyclopts.MissingArgumentError) and (of := error.argument):
        named = of.name if of.index is None else of.name[2:].upper()
        fix = "; write --sbatch=--qos=high, as it begins with -" if named == "--sbatch" else ""
        return f"{named}: no value is given{fix}"
    return str(error).splitlines()[0]


def _nearest(typed: str, known: list[str]) -> str:
    near = difflib.get_close_matches(typed, known, n=1)
    return f" (did you mean {near[0]}?)" if near else ""


class _Plain(logging.Formatter):
    """Formats log lines without control characters from names, and with credentials masked."""

    def format(self, record: logging.LogRecord) -> str:
        return masked(plain(super().format(record)))


def _log_to_stderr() -> None:
    """Log to standard error which files verbs read and wrote, on rank 0 only. A launcher's
    ranks keep torch's C++ from warning with its stack, as those that we start do (launch.local)."""
    if Job.here().launched:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    log = logging.getLogger("meshwise")
    handler = logging.StreamHandler() if Job.here().leads else logging.NullHandler()
    handler.setFormatter(_Plain())
    log.handlers = [handler]
    log.setLevel(logging.INFO)
