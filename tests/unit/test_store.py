"""Files: round trips, errors that name the field, torn lines, run directories."""

import gzip
import hashlib
import os

import pytest

from meshwise import files, store
from meshwise.spec import Case, Cluster, Device, Gemm, RunInfo, Sample, Tier

CLUSTER = Cluster(
    name="two",
    num_hosts=1,
    num_devices_per_host=2,
    device=Device(name="cpu", kind="cpu", memory_bytes=2**30),
    tiers=(Tier(name="shared memory", num_devices=2),),
)
CASE = Case(op=Gemm(m=1, n=2, k=3), world_size=2)
SAMPLE = Sample(case_id=CASE.id, case=CASE, status="ok", times_s=(1.0, 2.0))


def new_run(path, slug="Profile two"):
    return store.create(
        path, verb="measure", slug=slug, cluster=CLUSTER, world_size=2,
        command=("meshwise", "measure"), provenance={"torch": "none"},
    )  # fmt: skip


@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_round_trip(tmp_path, suffix):
    path = store.write(tmp_path / f"cluster{suffix}", CLUSTER)
    assert store.read(path, Cluster) == CLUSTER


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("memory_bytes = 1073741824", "memory_bytes = 0", r"device.memory_bytes = 0: .*>= 1"),
        ('kind = "cpu"', 'kind = "tpu"', r"device.kind = 'tpu'"),
        ("schema_version = 1", "schema_version = 7", r"schema_version is 7, this version reads 1"),
        ("num_hosts = 1", "num_hots = 1", r"num_hots|num_hosts"),
        ("num_hosts = 1", "num_hosts = ", r"is not TOML"),
    ],
)
def test_a_wrong_field_is_named_with_its_value(tmp_path, old, new, message):
    path = store.write(tmp_path / "cluster.toml", CLUSTER)
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ValueError, match=message) as error:
        store.read(path, Cluster)
    assert "\n" not in str(error.value)


def test_a_layout_with_a_long_name_has_a_run_directory(tmp_path):
    assert new_run(tmp_path, slug="ways " + "selective:1/" * 64).is_dir()


def test_missing_file():
    with pytest.raises(ValueError, match=r"nowhere.toml does not exist"):
        store.read("nowhere.toml", Cluster)


def test_run_directory_keeps_samples_and_reports_torn_lines(tmp_path):
    run_dir = new_run(tmp_path)
    assert store.load(run_dir)[0].status == "running"
    store.append(run_dir, SAMPLE)
    with open(run_dir / "samples.jsonl", "a") as file:
        file.write('{"case_id": "abc", "case')  # killed in the middle of a line
    other = Case(op=Gemm(m=4, n=4, k=4))
    store.append(run_dir, Sample(case_id=other.id, case=other, status="oom", reason="too large"))
    info, samples, warnings = store.load(run_dir)
    assert [sample.status for sample in samples] == ["ok", "oom"]
    assert len(warnings) == 1 and "samples.jsonl:2 is truncated" in warnings[0]
    store.finish(run_dir, "partial", "budget")
    assert store.read(run_dir / "run.json", RunInfo).status == "partial"
    assert info.cluster == CLUSTER


def test_the_last_sample_of_a_case_counts(tmp_path):
    run_dir = new_run(tmp_path)
    store.append(run_dir, Sample(case_id=CASE.id, case=CASE, status="oom", reason="first"))
    store.append(run_dir, SAMPLE)
    assert store.load(run_dir)[1] == [SAMPLE]


def test_an_id_of_before_a_field_was_added_is_read_as_that_of_the_case(tmp_path):
    """Ids used to be of all fields, defaults included, as the line has them."""
    run_dir = new_run(tmp_path)
    case = (
        '{"lowering":"eager","op":{"dtype":"bf16","k":3,"m":1,"n":2,"op":"gemm","trans_a":false,'
        '"trans_b":true},"regime":"warm","world_size":2}'
    )
    old_id = hashlib.sha256(case.encode()).hexdigest()[:12]
    line = f'{{"case_id":"{old_id}","case":{case},"status":"ok","times_s":[1.0,2.0]}}\n'
    wrong = line.replace('"m":1', '"m":4')
    (run_dir / "samples.jsonl").write_text(line + wrong)
    _, samples, (warning,) = store.load(run_dir)
    assert samples == [SAMPLE] and old_id != SAMPLE.case_id
    assert "samples.jsonl:2 was skipped" in warning and "is not its case's" in warning
    store.append(run_dir, SAMPLE)
    assert store.load(run_dir)[1] == [SAMPLE]  # one case, not two


def test_runs_are_found_by_verb_and_by_kind_of_measurement(tmp_path):
    for run_id in ("1-measure-profile-a", "2-measure-gemm-a", "3-run-gpt"):
        (tmp_path / run_id).mkdir()
        (tmp_path / run_id / "run.json").touch()
    names = [[path.name for path in store.runs_of(tmp_path, verb)] for verb in
             (None, "measure", "measure-gemm", "calibrate")]  # fmt: skip
    assert [len(found) for found in names] == [3, 2, 1, 0]
    assert names[2] == ["2-measure-gemm-a"]
    with pytest.raises(ValueError, match=r"no measure fsdp run under .*; run `meshwise measure fs"):
        store.newest(tmp_path, "measure-fsdp")


def test_an_archived_run_reads_the_same(tmp_path):
    run_dir = new_run(tmp_path)
    store.append(run_dir, SAMPLE)
    plain = store.load(run_dir)
    path = run_dir / "samples.jsonl"
    (run_dir / "samples.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    assert store.load(run_dir) == plain


def test_newest_run_by_verb(tmp_path):
    with pytest.raises(ValueError, match="run `meshwise measure` first"):
        store.newest(tmp_path, "measure")
    first, second = new_run(tmp_path), new_run(tmp_path)
    assert store.newest(tmp_path, "measure") == second != first


@pytest.mark.skipif(os.geteuid() == 0, reason="root can write anywhere")
def test_unwritable_directory_as_a_user(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ValueError, match="cannot be written"):
        new_run(tmp_path / "runs")


def test_unwritable_directory(tmp_path):
    (tmp_path / "runs").write_text("a file in the way")
    with pytest.raises(ValueError, match="cannot be written"):
        new_run(tmp_path / "runs")


def test_lines_of_many_small_values_are_refused_before_they_take_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MOST_VALUES", 100)
    (tmp_path / "steps.jsonl").write_text("[" + "1," * 101 + "1]\n")
    with pytest.raises(ValueError, match="holds more than 100 values"):
        store.steps(tmp_path)
