"""``meshwise VERB ...``: finds the verb's module when it is called, turns errors into one line.

Exit codes: 0 done, 2 bad input, 3 a comparison gate failed, 4 some cases failed or ranks died,
130 interrupted, 143 or 129 ended by SIGTERM or SIGHUP.
"""

import gc
import logging
import sys
from os.path import exists
from typing import NoReturn, get_args, get_origin

import cyclopts

from meshwise import signals
from meshwise.cli.output import BAD_INPUT, DONE, INTERRUPTED, SOME_FAILED
from meshwise.text import masked, one_line, plain

_HELP = """Measure a GPU cluster, price it, plan a model's layout, run it, compare.

Each verb takes the files of the one before from the working directory and says which it took.
Exit codes: 0 done, 2 bad input, 3 a gate of compare caught something, 4 cases failed or ranks died,
130 interrupted, 143 or 129 ended by SIGTERM or SIGHUP.
"""

_VERBS = {
    "detect": "Look at this machine; writes cluster.toml.",
    "measure": "Time operations on every rank; writes a run directory. Alone: profile.",
    "calibrate": "Turn measurements into prices; writes costs.json.",
    "plan": "Find the fastest layout that fits; writes plan.json.",
    "run": "Execute a plan: predicted beside measured; writes a run directory.",
    "refit": "Move weights between layouts: how fast, bounded by what, checked.",
    "compare": "Compare two runs: ratio, interval, verdict.",
    "report": "Write one self-contained page of it all.",
    "show": "Print any of our files readably.",
}
_MODULES = ("measure", "run", "refit", "show")  # the others stand together


def _app() -> cyclopts.App:
    app = cyclopts.App(
        name="meshwise",
        help=_HELP,
        help_format="plaintext",
        version=_version,
        config=(_commas, _whole_numbers),
        default_parameter=cyclopts.Parameter(negative=()),
        exit_on_error=False,
        print_error=False,
        suppress_keyboard_interrupt=False,
        result_action="return_value",
    )
    for place, (verb, says) in enumerate(_VERBS.items()):
        module = verb if verb in _MODULES else "verbs"
        app.command(f"meshwise.cli.{module}:{verb}", name=verb, help=says, sort_key=place)
    return app


def _commas(_: cyclopts.App, __: object, arguments: cyclopts.ArgumentCollection) -> None:
    """Take 128,256 for 128 256 in every list; the name of a file that is there stays whole."""
    for argument in arguments:
        if get_origin(argument.hint) is tuple and bool not in get_args(argument.hint):
            argument.tokens[:] = [
                token.evolve(value=part)
                for token in argument.tokens
                for part in _parts(token.value)
            ]
            for token in argument.tokens:
                if not token.value:
                    raise cyclopts.CoercionError("a place in the list is empty", token=token)


def _parts(value: str) -> list[str]:
    return [value] if exists(value) else [part.strip() for part in value.split(",")]


def _whole_numbers(_: cyclopts.App, __: object, arguments: cyclopts.ArgumentCollection) -> None:
    """Refuse 1.5 where a whole number belongs; cyclopts would round it."""
    for argument in arguments:
        whole = (int, int | None, tuple[int, ...])
        for token in argument.tokens if argument.hint in whole else ():
            if "." in token.value:
                raise cyclopts.CoercionError(f"{token.value} is not a whole number", token=token)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("meshwise")
    except PackageNotFoundError:
        return "a checkout that is not installed"


def main(arguments: list[str] | None = None) -> NoReturn:
    """The program: parse, do, exit. At exit Python would look through all objects for cycles, which
    takes half a second behind a search; frozen ones it passes over."""
    _log_to_stderr()
    code = _done(arguments)
    gc.freeze()
    sys.exit(code)


def _done(arguments: list[str] | None) -> int:
    """Run one verb and return the exit code; whoever uses us wrongly sees no traceback."""
    try:
        return _app()(arguments) or DONE
    except cyclopts.UnusedCliTokensError as error:
        words = " ".join(error.unused_tokens or ())
        return _say(f"{words}: not understood here; --help lists what is", BAD_INPUT)
    except cyclopts.CycloptsError as error:
        return _say(str(error).splitlines()[0], BAD_INPUT)
    except KeyboardInterrupt as stop:
        print(one_line("; ".join(filter(None, ["interrupted", str(stop)]))), file=sys.stderr)
        return INTERRUPTED
    except signals.Ended as stop:
        print(one_line(str(stop)), file=sys.stderr)
        return 128 + stop.number
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return _say("this verb needs PyTorch; pip install 'meshwise[torch]'", BAD_INPUT)
    except RuntimeError as error:
        from meshwise.launch import RanksFailed

        if not isinstance(error, RanksFailed):
            raise
        return _say(str(error), SOME_FAILED)
    except (ValueError, OSError) as error:
        return _say(getattr(error, "typed", str(error)), BAD_INPUT)


def _say(message: str, code: int) -> int:
    print(f"error: {one_line(message)}", file=sys.stderr)
    return code


class _Plain(logging.Formatter):
    """Lines in which names cannot move the cursor or begin a line; without what logs in."""

    def format(self, record: logging.LogRecord) -> str:
        return masked(plain(super().format(record)))


def _log_to_stderr() -> None:
    """Show which files verbs took and what they wrote. Rank 0 alone."""
    from meshwise.verbs import job

    log = logging.getLogger("meshwise")
    handler = logging.StreamHandler() if job.leads() else logging.NullHandler()
    handler.setFormatter(_Plain())
    log.handlers = [handler]
    log.setLevel(logging.INFO)
