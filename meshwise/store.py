"""Files between stages: records in JSON or TOML, and append-only run directories.

``runs/<UTC>-<verb>-<slug>/run.json`` is written before the first sample. ``samples.jsonl`` gets one
line per case as soon as it is measured, flushed to disk, so a killed run keeps its finished cases.
``steps.jsonl`` gets one line per step of a training as it ends.
"""

import io
import re
import reprlib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from meshwise import files
from meshwise.spec import (
    AnyModel,
    Cluster,
    Costs,
    Layout,
    Plan,
    RunInfo,
    Sample,
    StepLine,
    digest,
    stages_of,
)
from meshwise.text import one_line

T = TypeVar("T")

MOST_DAMAGED = 1000  # lines of a file of samples
# Fields that identify a file's kind when it is given for another kind.
_MARKS: dict[type, set[str]] = {
    Plan: {"layout", "stages"}, Costs: {"curves", "surfaces"}, Cluster: {"device", "tiers"},
}  # fmt: skip
_A: dict[type, str] = {Plan: "a plan", Costs: "costs", Cluster: "a cluster"}

_limits = reprlib.Repr()  # a hostile value may be large
_limits.maxstring = _limits.maxother = 120
_bounded = _limits.repr
_BOUND = re.compile(r"^Expected `(?:int|float)` ([<>]=?) (-?\d+)(?:\.0)?$")  # as msgspec says it


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def read(path: Path | str, kind: type[T]) -> T:
    """Read one record from a .json or .toml file. Errors name the file, the field and its value."""
    path = Path(path)
    parse = files.parse_toml if path.suffix == ".toml" else files.parse_json
    data = parse(files.read_bytes(path), str(path))
    return convert(data, kind, str(path))


def parse(text: str, kind: type[T], name: str) -> T:
    """Read one record from JSON text. Errors call the text ``name``."""
    return convert(files.parse_json(text, name), kind, name)


def convert(data: Any, kind: type[T], source: str) -> T:
    """Make a record from plain data. An error names the field that does not fit and its value."""
    for other, marks in _MARKS.items() if kind in _MARKS and isinstance(data, dict) else ():
        if other is not kind and marks <= data.keys():
            raise ValueError(f"{source}: holds {_A[other]}, not {_A[kind]}; name another file")
    data = _upgraded(data, source)
    fields = msgspec.structs.fields(kind) if isinstance(kind, type(msgspec.Struct)) else ()
    supported = next((f.default for f in fields if f.name == "schema_version"), None)
    if supported is not None:
        found = data.get("schema_version") if isinstance(data, dict) else None
        if found != supported:
            anew = f"{'name another, or ' * (found is None)}write the file anew with this version"
            if kind is Plan:
                anew += ": meshwise plan"
            if kind is Costs and isinstance(data, dict):
                runs = _bounded(data.get("runs"))
                anew = f"make it anew of its runs: meshwise calibrate RUN... ({runs})"
            raise ValueError(
                f"{source}: schema_version is {'missing' if found is None else _bounded(found)}, "
                f"this version reads {supported}; {anew}"
            )
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        message = str(error)
        found_path = re.search(r" - at `\$([^`]*)`$", message)
        if found_path is None:
            allowed = _allowed(kind, "") if "unknown field" in message else ""
            raise ValueError(f"{source}: {message}{allowed}") from None
        field = found_path[1].lstrip(".")
        reason = _BOUND.sub(r"must be \1 \2", message[: found_path.start()]) + _allowed(kind, field)
        raise ValueError(
            f"{source}: {field} = {_bounded(_lookup(data, field))}: {reason}"
        ) from None


def _allowed(kind: Any, field: str) -> str:
    """Return the words that a field may have, or without a field the fields of the record."""
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        return ""
    if not field:
        return f"; the fields are {', '.join(kind.__struct_fields__)}"
    hint = get_type_hints(kind).get(field)
    words = get_args(hint) if get_origin(hint) is Literal else ()
    return f"; must be one of {', '.join(map(str, words))}" if words else ""


def _upgraded(data: Any, source: str) -> Any:
    """Upgrade plans of versions 1 and 2, alone or in a run: their stages had fewer fields."""
    if not isinstance(data, dict):
        return data
    if isinstance(data.get("plan"), dict):
        return data | {"plan": _upgraded(data["plan"], source)}
    is_first = data.get("schema_version") == 1 and data.get("schedule") == "none"
    if not (is_first or data.get("schema_version") == 2) or "stages" not in data:
        return data
    try:
        layout = msgspec.convert(data["layout"], Layout)
        stages = stages_of(layout, msgspec.convert(data["model"], AnyModel))
        made = msgspec.json.decode(msgspec.json.encode(stages))
        told = [{name: of[name] for name in of.keys() - {"sharding"}} for of in data["stages"]]
        due = [{name: of[name] for name in own} for of, own in zip(made, told, strict=True)]
    except (KeyError, TypeError, AttributeError, ValueError, msgspec.ValidationError):
        return data  # refused later as a version that is not read
    if told != due:
        raise ValueError(f"{source}: stages are not those of its layout; plan anew: meshwise plan")
    rest = {name: value for name, value in data.items() if not (is_first and name == "schedule")}
    return rest | {"schema_version": 3, "stages": made}


def _lookup(data: Any, field: str) -> Any:
    """Return the value at ``a.b[2].c``, or "..." if it is absent or hidden by msgspec."""
    for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", field):
        try:
            data = data[int(index)] if index else data[name]
        except (KeyError, IndexError, TypeError):
            return "..."
    return data


def write(path: Path | str, record: msgspec.Struct) -> Path:
    """Write one record, whole or not at all; the path's suffix sets the format."""
    path = Path(path)
    if path.suffix == ".toml":
        import tomli_w

        text = tomli_w.dumps(_without_none(msgspec.to_builtins(record)))
    else:
        text = msgspec.json.format(msgspec.json.encode(record), indent=1).decode() + "\n"
    return files.write_whole(path, text)


def _without_none(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _without_none(value) for key, value in data.items() if value is not None}
    if isinstance(data, list | tuple):
        return [_without_none(value) for value in data]
    return data


def create(
    runs: Path | str,
    *,
    verb: str,
    slug: str,
    cluster: Cluster,
    world_size: int,
    command: tuple[str, ...],
    provenance: dict[str, Any],
    plan: Plan | None = None,
) -> Path:
    """Make ``runs/<UTC>-<verb>-<slug>/`` with its run.json; an unwritable place fails here."""
    slug = re.sub(r"[^a-z0-9.]+", "-", slug.lower()).strip("-")[:160]  # names have 255 bytes
    stem = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{verb}-{slug}"
    for attempt in range(100):
        run_dir = Path(runs) / (stem if attempt == 0 else f"{stem}-{attempt}")
        try:
            run_dir.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise ValueError(f"{runs} cannot be written: {error.strerror}; use --runs") from None
        info = RunInfo(
            run_id=run_dir.name,
            verb=verb,
            command=command,
            started=now(),
            world_size=world_size,
            cluster=cluster,
            plan=plan,
            provenance=provenance,
        )
        write(run_dir / "run.json", info)
        files.write_whole(run_dir / "samples.jsonl", b"")
        files.sync_folder(runs)
        return run_dir
    raise ValueError(f"{runs}/{stem} exists a hundred times; wait a second")


def append(run_dir: Path | str, sample: Sample) -> None:
    """Append one line, on disk when this returns. A torn last line is ended, not overwritten."""
    files.append_line(Path(run_dir) / "samples.jsonl", msgspec.json.encode(sample))


def append_step(run_dir: Path | str, line: StepLine) -> None:
    """Append one line to ``steps.jsonl``."""
    files.append_line(Path(run_dir) / "steps.jsonl", msgspec.json.encode(line), sync=False)


def steps(run_dir: Path | str) -> list[StepLine]:
    """Return the finished steps of a training, also of one that was interrupted."""
    path = Path(run_dir) / "steps.jsonl"
    return [
        convert(files.parse_json(line, where), StepLine, where)
        for where, line in _lines(path)
        if line.endswith(b"}")
    ]


def finish(run_dir: Path | str, status: str, reason: str = "") -> None:
    """Record the end of a run: complete, partial, interrupted or failed."""
    path = Path(run_dir) / "run.json"
    info = read(path, RunInfo)
    done = msgspec.structs.replace(info, status=status, reason=one_line(reason), ended=now())
    write(path, done)


def load(run_dir: Path | str) -> tuple[RunInfo, list[Sample], list[str]]:
    """Return a run, its samples (the last one per case), and a warning per damaged line."""
    run_dir = Path(run_dir)
    info = read(run_dir / "run.json", RunInfo)
    samples: dict[str, Sample] = {}
    warnings, again = [], list[str]()
    for where, line in _lines(run_dir / "samples.jsonl"):
        try:
            sample = _sample(line, where)
        except ValueError as error:
            warnings.append(str(error))
            if len(warnings) > MOST_DAMAGED:
                told = f"more than {MOST_DAMAGED} lines are damaged; copy the run again"
                raise ValueError(f"{run_dir}/samples.jsonl: {told}") from None
        else:
            before = samples.get(sample.case_id, sample)
            again += [where] * (before.status == sample.status == "ok" and before is not sample)
            samples[sample.case_id] = sample
    if again:
        more = f" and {len(again) - 1} more" if len(again) > 1 else ""
        warnings.append(f"{again[0]}{more}: a case that an earlier line has; the later one counts")
    return info, list(samples.values()), warnings


def _sample(line: bytes, where: str) -> Sample:
    try:
        entry = files.parse_json(line, where)
        sample = convert(entry, Sample, where)
    except ValueError as error:
        raise ValueError(f"{where} is truncated or damaged and was skipped ({error})") from None
    case_id = sample.case.id
    # older lines have the digest of the case with the fields of their version
    if sample.case_id not in (case_id, digest(entry["case"])):
        raise ValueError(f"{where} was skipped: case_id {sample.case_id} is not its case's")
    return msgspec.structs.replace(sample, case_id=case_id)


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the lines of a file, or of its ``gzip`` file, each with its place."""
    packed, most = path.with_name(path.name + ".gz"), files.MOST_LINES_BYTES
    data = b""
    if packed.exists():
        data = files.unpack(files.read_bytes(packed, at_most=most), packed, at_most=most)
    elif path.exists():
        data = files.read_bytes(path, at_most=most)
    if data.count(b",") > files.MOST_VALUES:
        raise ValueError(
            f"{path} holds more than {files.MOST_VALUES:,} values; is it the right one?"
        )
    for number, line in enumerate(io.BytesIO(data), 1):
        yield f"{path}:{number}", line.rstrip(b"\r\n")


def runs_of(runs: Path | str, verb: str | None = None) -> list[Path]:
    """List run directories, oldest first; ``verb`` may include a kind (``measure-profile``)."""
    found = sorted(path.parent for path in Path(runs).glob("*/run.json"))
    return [path for path in found if verb is None or f"-{verb}-" in path.name]


def newest(runs: Path | str, verb: str) -> Path:
    """Return the latest run directory of a verb."""
    found = runs_of(runs, verb)
    if not found:
        spoken = verb.replace("-", " ")
        raise ValueError(f"no {spoken} run under {runs}; run `meshwise {spoken}` first")
    return found[-1]
