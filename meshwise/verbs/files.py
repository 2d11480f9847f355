"""Files that verbs hand to each other, by default in the working directory. Reading logs them."""

import contextlib
import logging
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from meshwise import provenance, store
from meshwise.files import parse_toml, read_bytes, write_whole
from meshwise.spec import Cluster, Costs, Layout, Plan, Recipe, RunInfo, Sample
from meshwise.spec.run import changes

T = TypeVar("T", Cluster, Costs, Layout, Plan, Recipe)

log = logging.getLogger("meshwise")

T2 = TypeVar("T2", str, Path | str)
_WRITER: dict[type, str] = {Cluster: "detect", Costs: "calibrate", Plan: "plan"}


def take(path: Path | str, kind: type[T]) -> T:
    """Read ``path`` and log it. If it is missing, the error names the verb that writes it. A
    cluster may also be the name of one that comes with Meshwise, as ``h100-hgx``."""
    others = ""
    if kind is Cluster and not Path(path).exists():
        from meshwise import machine

        shipped = machine.shipped()
        if str(path) in shipped:
            log.info("using the cluster %s that comes with Meshwise", path)
            toml = parse_toml(shipped[str(path)].read_bytes(), str(path))
            return store.convert(toml, kind, str(path))
        others = f", and these come with Meshwise: {', '.join(shipped)}"
    if not Path(path).exists():
        raise ValueError(f"{path} does not exist; `meshwise {_WRITER[kind]}` writes it{others}")
    announce(path)
    return store.read(path, kind)


def prices(path: Path | str) -> Costs:
    """Read costs. Warn of curves that fall as sizes rise, and of prices that have expired: by the
    cluster.toml beside them, and by this machine if it has the devices that were priced. Plans for
    far machines are made anywhere."""
    from meshwise import fit

    costs, beside = take(path, Costs), Path(path).with_name("cluster.toml")
    for doubt in fit.falling(costs):
        log.warning("%s", doubt)
    priced, now = _described(costs.cluster) | costs.versions, dict[str, str]()
    with contextlib.suppress(ValueError, OSError):
        now = _described(store.read(beside, Cluster)) if beside.exists() else now
    machine = provenance.here(costs.cluster.device.kind)
    warn_if_expired(priced, now | (machine if machine.get("device") == priced["device"] else {}))
    return costs


def _described(cluster: Cluster) -> dict[str, str]:
    return {"device": cluster.device.name, "devices a host": str(cluster.num_devices_per_host)}


def warn_if_expired(measured: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Warn if prices were measured with other versions (``RunInfo.versions``) than are here now."""
    if changed := changes(measured, now):
        log.warning(
            "these prices may have expired, since then: %s; measure anew: meshwise measure profile "
            "&& meshwise calibrate", changed
        )  # fmt: skip


def record(given: T | Path | str, kind: type[T], name: str = "") -> T:
    """Return a record as it is, or read it from JSON text (``{"dp": 2}``) or from a file. ``name``:
    the option that gave it, by default the kind."""
    if isinstance(given, kind):
        return given
    text, name = str(given), name or kind.__name__.lower()
    if not text.strip():
        raise ValueError(f"{name} = {text!r}: give JSON, or a file of it")
    return store.parse(text, kind, name) if text.lstrip()[0] == "{" else store.read(text, kind)


def several(value: T2 | tuple[T2, ...] | list[T2]) -> tuple[T2, ...]:
    """Return a tuple or list as a tuple, and a single value as a tuple of one."""
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def announce(path: Path | str, what: str = "") -> None:
    """Log ``using ./cluster.toml`` or ``using the newest run runs/...``."""
    shown = Path(path) if Path(path).is_absolute() else f"./{Path(path)}"
    log.info("using %s%s", f"{what} " if what else "", shown)


def replace(path: Path | str, record: Cluster | Plan) -> None:
    """Write a record. A file that holds it already stays, with its comments. One that holds another
    may be edited by hand, or in use: copy it first to ``path.bak``, or ``.bak1`` and so on."""
    path = Path(path)
    if path.is_file():
        with contextlib.suppress(ValueError, OSError):
            if store.read(path, type(record)) == record:
                log.info("%s needs no change", path)
                return
        there, number = read_bytes(path), 0
        while (kept := Path(f"{path}.bak{number or ''}")).exists() and read_bytes(kept) != there:
            number += 1
        write_whole(kept, there)
        log.info("kept the %s that was there as %s", path.name, kept)
    store.write(path, record)
    log.info("wrote %s", path)


def check_writable(paths: Iterable[Path | str], field: str = "") -> None:
    """Refuse paths early that could not be written later: folders, and the folders of CSV files.
    ``field``: the option that gave them."""
    for path in map(Path, paths):
        folder = path.parent if path.suffix == ".csv" else path
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            reason = f"cannot be written: {error.strerror}"
            if field:
                raise ValueError(f"{field} = {str(path)!r}: {reason}; name another") from None
            raise ValueError(f"{path} {reason}") from None


def load(path: Path | str) -> tuple[RunInfo, list[Sample]]:
    """Load a run from its directory, its run.json or samples.jsonl. Log lines that were left
    out."""
    run_dir = Path(path)
    if run_dir.name in ("run.json", "samples.jsonl"):
        run_dir = run_dir.parent
    if not (run_dir / "run.json").exists():
        raise ValueError(f"{path} is not a run directory; give runs/<id>")
    info, samples, warnings = store.load(run_dir)
    for warning in warnings:
        log.warning("%s", warning)
    return info, samples
