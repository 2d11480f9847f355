"""`report --scaling`: rows, words and pictures from files as `measure ring` writes them.

Expected numbers are worked out here from the times, never by the pages.
"""

import json
import re
import struct
import xml.etree.ElementTree as ET

import pytest

from meshwise.cli import app
from meshwise.pages import scaling, scaling_figures
from meshwise.verbs.report import scaling as report_scaling

CONFIG = {
    "batch_size": 2, "seq_lengths": [16384, 32768, 65536], "embed_dim": 768, "num_heads": 12,
    "num_kv_heads": 12, "segment_lengths": [2048, 4096, 8192], "dilation_rates": [1, 2, 4],
    "ring_sizes": [1, 2, 4], "warmup_runs": 3, "benchmark_runs": 10, "use_flash_attention": True,
    "dtype": "float16", "causal": True, "offsets": "mod",
}  # fmt: skip
TIMES_MS = {  # of (tokens, ring)
    (16384, 1): 4.4, (16384, 2): 2.6, (16384, 4): 1.8,
    (32768, 1): 8.8, (32768, 2): 4.6, (32768, 4): 2.7,
    (65536, 2): 9.0, (65536, 4): 4.7,
}  # fmt: skip


def row(tokens, ring, *, world=4, status="ok", reason=None, **changes):
    """A result as `measure ring` writes one; without a status other than ok, with every number."""
    blank = {"seq_length": tokens, "ring_size": ring, "world_size": world, "rank": 0}
    if status != "ok":
        return blank | {"status": status, "reason": reason, "total_time_ms": None}
    time_ms = changes.pop("time_ms", None) or TIMES_MS[tokens, ring]
    sends = ring > 1 and tokens // ring < 8192
    peak_gb = changes.pop("peak_gb", 0.05 + tokens / ring / 8e4)
    return blank | {
        "status": "ok", "reason": None, "forward_time_ms": 0.3 * time_ms,
        "backward_time_ms": 0.7 * time_ms, "total_time_ms": time_ms, "time_min_ms": 0.97 * time_ms,
        "time_median_ms": time_ms, "time_p95_ms": 1.05 * time_ms, "time_max_ms": 1.2 * time_ms,
        "throughput_tokens_per_sec": 2 * tokens / time_ms * 1e3, "effective_batch_size": 2,
        "communication_time_ms": 0.35 if sends else 0.0, "peak_memory_gb": peak_gb,
        "exposed_comm_ms": 0.15 if sends else 0.0, "overlap_fraction": 0.571 if sends else None,
        "bytes_sent": 12_600_000 if sends else 0, "bytes_received": 12_600_000 if sends else 0,
        "comm_lower_bound_bytes": 12_600_000 if sends else 0, "comm_lower_bound": "planned",
        "comm_efficiency": 1.0 if sends else None, "achieved_tflops": 310.0 / ring / time_ms,
        "flop_convention": "attended pairs with multiplicity, backward 2.5 times",
        "load_imbalance": 1.25 if sends else 1.0, "collectives": 6 if sends else 0,
        "strategy": "heads" if sends else "local", "layout": "contiguous",
    } | changes  # fmt: skip


def full():
    rows = [row(tokens, ring) for tokens, ring in TIMES_MS]
    rows.append(row(65536, 1, status="oom", reason="CUDA out of memory: 139 GB"))
    why = "ring_size = 8: exceeds the world of 4"
    return [*rows, *(row(n, 8, status="skipped", reason=why) for n in CONFIG["seq_lengths"])]


def write(folder, rows, *, world=4, stamp="20261122_010203", config=CONFIG, **changes):
    folder.mkdir(parents=True, exist_ok=True)
    document = {
        "schema_version": 1, "config": config, "world_size": world, "timestamp": stamp,
        "run_dir": None, "device": "NVIDIA H200", "results": rows,
    } | changes  # fmt: skip
    path = folder / f"ring_v2_collective_benchmark_{stamp}_world{world}.json"
    path.write_text(json.dumps(document))
    return path


def changed(**values):
    return CONFIG | values


def read(folder, rows, **how):
    write(folder, rows, **how)
    return scaling.read(folder)


def test_speedup_and_efficiencies_compare_with_one_gpu(tmp_path):
    found = read(tmp_path, full())
    one = found.at(32768, 4)
    assert one.speedup == pytest.approx(8.8 / 2.7)
    assert one.strong == pytest.approx(8.8 / 2.7 / 4)
    assert one.weak is None  # 8192 tokens were not measured
    assert found.at(32768, 2).weak == pytest.approx(4.4 / 4.6)
    assert found.at(16384, 4).exposed_share == pytest.approx(0.15 / 1.8)
    assert found.at(16384, 2).tokens_per_gb == pytest.approx(2 * 16384 / (0.05 + 8192 / 8e4))
    assert found.at(16384, 1).speedup == 1


def test_a_row_whose_forward_took_as_long_as_all_says_noisy(tmp_path):
    rows = full()
    rows[1] |= {"forward_time_ms": rows[1]["total_time_ms"], "backward_time_ms": None}
    rows[1] |= {"reason": "noisy: the forward alone took as long as forward and backward"}
    rows[2] |= {"backward_time_ms": 0.0}  # as it was written before
    times = scaling.tables(read(tmp_path, rows))[0]
    assert [row[4] for row in times.rows].count("noisy") == 2


def test_a_length_without_a_time_of_one_gpu_has_no_speedup(tmp_path):
    one = read(tmp_path, full()).at(65536, 4)
    assert (one.speedup, one.strong, one.memory_share) == (None, None, None)
    assert one.weak == pytest.approx(4.4 / 4.7)  # of 16384 tokens on one rank


def test_a_peak_of_a_case_that_failed_is_no_baseline(tmp_path):
    rows = [row(16384, 1, status="oom"), row(16384, 2)]
    rows[0]["peak_memory_gb"] = 139.0
    assert read(tmp_path, rows).at(16384, 2).memory_share is None


def test_each_ring_size_may_come_from_a_world_of_its_own(tmp_path):
    """As after `measure ring --all`, where no file holds both a ring and its baseline."""
    for ring in (1, 2, 4):
        write(tmp_path, [row(16384, ring, world=ring)], world=ring, stamp=f"20261122_01000{ring}")
    found = scaling.read(tmp_path)
    assert [one.result.ring_size for one in found.rows] == [1, 2, 4]
    assert found.at(16384, 4).speedup == pytest.approx(4.4 / 1.8)
    assert len(found.files) == 3 and not found.left_out


def test_a_newer_row_counts_but_a_skipped_one_never_hides_a_time(tmp_path):
    write(tmp_path, [row(16384, 4, time_ms=7.0), row(16384, 1)], world=4, stamp="20261122_010000")
    skipped = row(16384, 4, world=2, status="skipped", reason="exceeds the world of 2")
    failed = row(16384, 1, world=2, status="error", reason="nan")
    write(tmp_path, [skipped, failed], world=2, stamp="20261122_020000")
    found = scaling.read(tmp_path)
    assert found.at(16384, 4).result.time_ms == 7.0
    assert found.at(16384, 1).result.status == "error"


def test_runs_of_another_configuration_or_older_are_left_out_by_name(tmp_path):
    older = write(tmp_path, [row(16384, 1, time_ms=9.0)], stamp="20261121_010000")
    other = write(tmp_path, [row(32768, 1)], world=2, config=changed(num_heads=16))
    slower = write(tmp_path, [row(65536, 2)], world=8, device="NVIDIA H100")
    found = read(tmp_path, [row(16384, 1)], stamp="20261123_010000")
    assert [one.result.time_ms for one in found.rows] == [4.4]
    assert sorted(said.split(":")[0] for said in found.left_out) == sorted(
        path.name for path in (older, other, slower)
    )
    assert "num_heads" in " ".join(found.left_out) and "another device" in " ".join(found.left_out)


def test_latest_json_alone_will_do(tmp_path):
    write(tmp_path, full()).rename(tmp_path / "latest.json")
    assert len(scaling.read(tmp_path).rows) == len(full())


@pytest.mark.parametrize(
    ("content", "fix"),
    [
        (None, "meshwise measure ring --output_dir"),
        ('{"schema_version": 1', "only files that `meshwise measure ring` wrote"),
        ('{"config": {}, "world_size": 1, "timestamp": "", "results": []}', "schema_version"),
        (
            '{"schema_version": 1, "config": {}, "world_size": 1, "timestamp": "", "results": []}',
            "meshwise measure ring",
        ),
        (
            '{"schema_version": 7, "config": {}, "world_size": 1, "timestamp": "", "results": []}',
            "schema_version is 7",
        ),
    ],
)
def test_what_cannot_be_read_is_one_line_with_the_fix(tmp_path, content, fix):
    if content is not None:
        (tmp_path / "latest.json").write_text(content)
    with pytest.raises(ValueError, match=re.escape(fix)) as error:
        scaling.read(tmp_path)
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


@pytest.mark.parametrize(
    ("where", "field", "value"),
    [
        ("results", "ring_size", 0),
        ("results", "seq_length", "many"),
        ("results", "total_time_ms", 0.0),
        ("results", "total_time_ms", -1.0),
        ("results", "total_time_ms", None),
        ("results", "throughput_tokens_per_sec", 0),
        ("results", "status", "fine"),
        ("config", "batch_size", "two"),
        ("config", "segment_lengths", 5),
        ("config", "num_heads", 0),
    ],
)
def test_a_value_that_cannot_be_names_the_file_and_the_field(tmp_path, where, field, value):
    rows, config = [row(16384, 1), row(16384, 2)], dict(CONFIG)
    (rows[1] if where == "results" else config)[field] = value
    path = write(tmp_path, rows, config=config)
    name = f"results[1].{field}" if where == "results" else f"config.{field}"
    with pytest.raises(ValueError, match=re.escape(f"{path}: {name} = {value!r}: ")) as error:
        scaling.read(tmp_path)
    assert "\n" not in str(error.value)


def test_conclusions_are_of_the_data(tmp_path):
    said = "\n".join(scaling.conclusions(read(tmp_path, full())))
    assert "Ring 2: 84.6 % of linear at 16,384 tokens to 95.7 % at 32,768" in said
    assert "65,536 tokens do not fit on one rank; a ring of 2 runs them." in said
    # 4.4 / 4 = 1.1 of 1.8 ms is ideal; a quarter more work than the mean takes 0.275 ms more
    assert "16,384 tokens on ring 4: 61.1 % of linear; of 1.80 ms it loses 700 us: " in said
    assert "150 us waiting for transfers, 275 us for uneven work, 275 us not explained" in said
    assert "at best 1.91x the speed of one rank" in said  # 8.8 / 4.6
    assert "4 of 12 cases have no time: 3 skipped, 1 oom." in said
    assert "32,768 tokens on ring 2: 95.7 %" not in said  # fair, so that nothing is explained


def test_what_explains_a_loss_is_never_more_than_the_loss(tmp_path):
    uneven = {"exposed_comm_ms": 0.3, "communication_time_ms": 0.25, "load_imbalance": 1.5}
    noisy = {"exposed_comm_ms": 5.0, "communication_time_ms": 0.5, "load_imbalance": 1.0}
    rows = [
        row(16384, 1, time_ms=4.0),
        row(16384, 2, time_ms=2.5, **uneven),  # loses 0.5, of which 1.0 would be uneven work
        row(16384, 4, time_ms=8.0, **noisy),  # loses 7.0
    ]
    said = "\n".join(scaling.conclusions(read(tmp_path, rows)))
    assert "loses 500 us: 250 us waiting for transfers, 250 us for uneven work." in said
    assert "loses 7.00 ms: 500 us waiting for transfers, 6.50 ms not explained" in said
    assert "Ring 4: 12.5 % of linear at 16,384 tokens; at best 0.50x the speed of one rank." in said


def test_the_headline_says_by_which_way_and_in_which_rings(tmp_path):
    how = changed(dense=True, way="ring", order="zigzag", forward_only=True)
    rows = [row(16384, 1), row(16384, 2, strategy="ring")]
    said = scaling.subtitle(read(tmp_path, rows, config=how))
    for words in ("dense", "forward only", "rings of 1, 2 ranks", "zigzag shards", "way ring"):
        assert words in said
    auto = scaling.subtitle(read(tmp_path / "auto", full()))
    assert "contiguous shards, way auto: local or heads" in auto


def test_too_much_traffic_and_memory_are_named(tmp_path):
    rows = [
        row(16384, 1, time_ms=4.0, peak_gb=1.0),
        row(16384, 2, time_ms=2.0, peak_gb=0.9, bytes_received=3e6, comm_lower_bound_bytes=2e6),
        row(16384, 4, time_ms=1.0, peak_gb=0.25, bytes_received=1e6, comm_lower_bound_bytes=0),
    ]
    said = "\n".join(scaling.conclusions(read(tmp_path, rows)))
    assert "ring 2: receives 3.00 MB, 1.50x the planned." in said
    assert "ring 4: receives 1.00 MB, none were planned." in said
    assert "ring 2: peak memory is 90.0 % of one rank's, ideal is 50.0 %." in said
    assert "ring 4: peak memory" not in said and "loses" not in said


def test_a_dense_run_says_that_work_grows_with_the_length(tmp_path):
    dense = read(tmp_path, [row(16384, 1)], config=changed(dense=True))
    assert "dense attention" in scaling.subject(dense.config) and "2048/1" not in scaling.subject(
        dense.config
    )
    assert "1 / ring size is ideal" in " ".join(scaling.text(dense).split())
    dilated = read(tmp_path / "dilated", [row(16384, 1)])
    assert "2048/1 4096/2 8192/4" in scaling.subject(dilated.config)
    assert "1 / ring size is ideal" not in " ".join(scaling.text(dilated).split())


def test_the_text_has_every_case_and_every_reason(tmp_path):
    text = scaling.text(read(tmp_path, full()))
    for words in ("CUDA out of memory: 139 GB", "ring_size = 8: exceeds the world of 4", "used"):
        assert words in text
    rows = [line.split() for line in text.split("Best ring")[0].splitlines() if "," in line[:7]]
    assert [(r[0], r[1]) for r in rows if r[2] in ("oom", "skipped")] == [
        ("16,384", "8"), ("32,768", "8"), ("65,536", "1"), ("65,536", "8"),
    ]  # fmt: skip
    assert max(map(len, text.splitlines())) <= 120


def test_the_best_ring_is_the_fastest_and_the_largest_that_pays(tmp_path):
    rows = [row(16384, ring, time_ms=ms) for ring, ms in ((1, 8.0), (2, 4.1), (4, 3.0), (8, 3.5))]
    (best,) = (
        each for each in scaling.tables(read(tmp_path, rows)) if each.title.startswith("Best ring")
    )
    assert best.rows == (("16,384", "4", "3.00 ms", "2.67x", "66.7 %", "2"),)


def size_of(png):
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", png[16:24])


KINDS = {
    "full": full,
    "one case": lambda: [row(16384, 1)],
    "one ring of several lengths": lambda: [row(n, 2) for n in (16384, 32768)],
    "one length, no memory": lambda: [row(16384, ring, peak_gb=None) for ring in (1, 2)],
    "nothing measured": lambda: [row(16384, 1, status="oom", reason="CUDA out of memory")],
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_picture_is_made_of_whatever_there_is(tmp_path, kind):
    found = read(tmp_path, KINDS[kind]())
    for name in scaling_figures.FILES:
        width, height = size_of(scaling_figures.png(name, found))
        assert width > 1000 and height > 500
    page = scaling_figures.page(found)
    for drawn in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ET.fromstring(drawn.replace("xlink:href", "href"))
    assert "http://" not in page and "https://" not in page and page.count("<script") == 1
    assert page.count("<svg") == 9


def texts(panel, found):
    """Words of one panel of the page."""
    drawn = scaling_figures.figure(panel, found).svg
    root = ET.fromstring(drawn.replace("xlink:href", "href"))
    return [element.text for element in root.iter() if element.tag.endswith("text")]


def test_a_case_that_failed_is_drawn_as_such(tmp_path):
    found = read(tmp_path, full())
    cells = texts(scaling_figures.time_map, found)
    assert cells.count("skipped") == 3 and cells.count("oom") == 1
    assert {"9.00", "4.70", "1.80"} <= set(cells)
    assert texts(scaling_figures.efficiency_map, found).count("no ring 1") == 2
    assert "oom, ring 1" in texts(scaling_figures.memory, found)


def test_memory_that_was_not_measured_is_one_sentence(tmp_path):
    found = read(tmp_path, [row(16384, ring, peak_gb=None) for ring in (1, 2)])
    for panel in scaling_figures.FILES["memory_analysis.png"]:
        assert "memory was not measured (CPU)" in texts(panel, found)


def test_a_speedup_below_one_has_ticks(tmp_path):
    rows = [row(16384, 1, time_ms=1.0), row(16384, 2, time_ms=5.0)]
    assert {"0.25x", "0.5x", "1x"} <= set(texts(scaling_figures.speedup, read(tmp_path, rows)))


def test_one_ring_size_draws_no_line_of_scaling(tmp_path):
    found = read(tmp_path, [row(16384, 1), row(32768, 1)])
    assert "one ring size only: no scaling to show" in texts(scaling_figures.speedup, found)
    assert "only one rank a ring: nothing is sent" in texts(scaling_figures.communication, found)
    assert not [word for word in texts(scaling_figures.throughput, found) if "linear" in word]


def test_the_verb_writes_five_files_beside_the_results(tmp_path):
    write(tmp_path, full())
    paths = report_scaling(tmp_path)
    assert [path.name for path in paths] == [
        "scaling_efficiency_analysis.png", "memory_analysis.png", "performance_heatmaps.png",
        "scaling_analysis_report.txt", "scaling.html",
    ]  # fmt: skip
    assert all(path.parent == tmp_path and path.stat().st_size > 1000 for path in paths)


@pytest.mark.parametrize("flag", ["--scaling", "--results_dir", "--results-dir"])
def test_the_command_line_writes_where_it_is_told(tmp_path, capsys, flag):
    write(tmp_path / "in", [row(16384, ring) for ring in (1, 2)])
    with pytest.raises(SystemExit) as end:
        app.main(["report", flag, str(tmp_path / "in"), "--output_dir", str(tmp_path / "out")])
    assert not end.value.code
    assert sorted(path.name for path in (tmp_path / "in").iterdir()) == [
        "ring_v2_collective_benchmark_20261122_010203_world4.json"
    ]
    assert len(list((tmp_path / "out").iterdir())) == 5
    assert "Ring 2: 84.6 % of linear" in capsys.readouterr().out


def test_the_command_line_prints_one_document(tmp_path, capsys):
    write(tmp_path, full())
    with pytest.raises(SystemExit):
        app.main(["report", "--scaling", str(tmp_path), "--json"])
    document = json.loads(capsys.readouterr().out)
    assert len(document["rows"]) == 12 and len(document["paths"]) == 5
    assert document["rows"][0]["result"]["total_time_ms"] == 4.4


@pytest.mark.parametrize(
    ("arguments", "fix"),
    [
        (["--scaling", "nowhere"], "measure ring"),
        (["--output-dir", "x"], "--output-dir = 'x': only --scaling"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, capsys, monkeypatch, arguments, fix):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        app.main(["report", *arguments])
    (line,) = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and line.startswith("error: ") and fix in line
