"""Primus' files, written after a measurement by the command line. The ranks are replaced by a
device of known speed."""

import csv
import json
from pathlib import Path

import pytest

from meshwise import store
from meshwise.cli import app
from meshwise.spec import Attention, Collective, Gemm, Sample
from tests import sample_records as known

PRIMUS = Path(__file__).parents[1] / "data" / "primus"
RATE, START_S = 1e13, 2e-5  # FLOP/s or bytes/s, and what a call takes besides

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    from meshwise import launch

    def run(target, request, **_):
        for case in request.cases:
            if case.op in lost:
                outcome = {"status": "hung", "reason": "rank 1 had stopped"}
            else:
                work = case.op.flops or case.op.size_bytes
                outcome = {"status": "ok", "times_s": (START_S + work / RATE,) * 3}
            store.append(request.run_dir, Sample(case_id=case.id, case=case, **outcome))
        store.finish(request.run_dir, "complete")

    lost = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(launch, "run", run)
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    store.write("cluster.toml", known.CPUS)
    return lost


def measure(arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        app.main(["measure", *arguments.split()])
    return ended.value.code


def rows(path: str) -> tuple[str, list[dict[str, str]]]:
    """The header and the rows of a CSV."""
    text = Path(path).read_text()
    return text.splitlines()[0], list(csv.DictReader(text.splitlines()))


def configs(*names: str) -> str:
    """Primus' file with these models alone."""
    every = json.loads((PRIMUS / "model_configs.json").read_text())
    chosen = [entry for entry in every if entry["model"] in names]
    assert len(chosen) == len(names)
    Path("configs.json").write_text(json.dumps(chosen))
    return "configs.json"


class TestGemm:
    HEADER = "model,m,n,k,transA,transB,dtype,Time(s),TFLOPS,Bandwidth(GB/s)"
    # n and k of Llama2_70B's products: heads of 128, 64 and twice 8 of them; width 28672
    PRODUCTS = ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672), (32000, 8192))

    def test_a_dense_model_has_120_rows_in_the_order_of_primus(self):
        path = configs("Llama2_70B")
        command = f"gemm --model-config-path {path} --dtype bf16 --report-dir-path out --json"
        assert measure(command) == 0
        header, found = rows("out/benchmark_gemm_Llama2_70B.csv")
        assert header == self.HEADER
        wanted = []
        for rows_of in range(1, 9):
            m = 4096 * rows_of
            for n, k in self.PRODUCTS:
                wanted += [(m, n, k, "N", "T"), (n, k, m, "T", "N"), (m, k, n, "N", "N")]
        assert len(found) == len(wanted) == 120
        for row, (m, n, k, *stored) in zip(found, wanted, strict=True):
            assert [int(row[name]) for name in "mnk"] == [m, n, k]
            assert [row["transA"], row["transB"]] == stored
            assert (row["model"], row["dtype"]) == ("Llama2_70B", "torch.bfloat16")
            time_s = START_S + 2 * m * n * k / RATE
            assert float(row["Time(s)"]) == pytest.approx(time_s)
            assert float(row["TFLOPS"]) == pytest.approx(2 * m * n * k / time_s / 1e12)
            moved = 2 * (m * k + k * n + m * n)
            assert float(row["Bandwidth(GB/s)"]) == pytest.approx(moved / time_s / 1e9)
        as_json = json.loads(Path("out/benchmark_gemm_Llama2_70B.json").read_text())
        assert [{name: str(value) for name, value in row.items()} for row in as_json] == found

    def test_each_model_has_a_file_of_its_own(self):
        path = configs("Llama2_7B", "Llama3.1_8B")
        assert measure(f"gemm --model-config-path {path} --report-dir-path out") == 0
        assert len(list(Path("out").iterdir())) == 4  # a CSV and a JSON each
        first = rows("out/benchmark_gemm_Llama3.1_8B.csv")[1][0]
        assert [first[name] for name in "mnk"] == ["8192", "6144", "4096"]

    @pytest.mark.parametrize("mode", ["cold", "warm --mode cold", "sustained --mode cold"])
    def test_the_times_are_of_the_mode_that_was_measured(self, mode):
        path = configs("Llama2_7B")
        options = f"--microbatch-size 2 --mode {mode} --report-dir-path out"
        assert measure(f"gemm --model-config-path {path} {options}") == 0
        found = rows("out/benchmark_gemm_Llama2_7B.csv")[1]
        assert len(found) == 15 and all(row["Time(s)"] for row in found)

    def test_what_was_not_measured_is_empty_and_no_zero(self, here):
        here.append(Gemm(m=4096, n=12288, k=4096, dtype="fp32"))
        path = configs("Llama2_7B")
        options = "--microbatch-size 1 --report-dir-path out"
        assert measure(f"gemm --model-config-path {path} {options}") == 4
        lost, *rest = rows("out/benchmark_gemm_Llama2_7B.csv")[1]
        assert [lost[name] for name in ("Time(s)", "TFLOPS", "Bandwidth(GB/s)")] == [""] * 3
        assert all(row["Time(s)"] for row in rest)

    def test_a_report_of_no_model_is_refused_before_ranks_start(self, capsys):
        assert measure("gemm --square 64 --report-dir-path out") == 2
        said = "--report-dir-path = 'out': its files list models; give --model or --model-config-"
        assert said in capsys.readouterr().err
        assert not Path("runs").exists()

    def test_a_folder_that_cannot_be_is_named_before_anything_is_measured(self, capsys):
        Path("out").write_text("a file in the way")
        assert measure("gemm --model gpt-30m --report-dir-path out") == 2
        last = capsys.readouterr().err.strip().splitlines()[-1]
        assert last == "error: out cannot be written: File exists"
        assert not Path("runs").exists()


class TestAttention:
    HEADER = (
        "model,batch_size,seqlen_q,seqlen_kv,num_head_q,num_head_kv,head_dim_qk,head_dim_v,causal,"
        "fwd_tflops,fwd_time,bwd_tflops,bwd_time,backend"
    )

    def test_every_shape_of_the_file_at_eight_batches_deepseek_too(self):
        path = PRIMUS / "attention_shapes.json"
        options = "--backend flash --backend flex --dtype bf16 --report-csv-path out/a.csv"
        assert measure(f"attention --shapes-json-path {path} {options}") == 0
        header, found = rows("out/a.csv")
        assert header == self.HEADER
        names = [entry["model"] for entry in json.loads(path.read_text())]
        assert len(found) == len(names) * 8 * 2
        assert {row["model"] for row in found} == set(names)
        by_key = {(r["model"], r["batch_size"], r["backend"]): r for r in found}
        llama = by_key["Llama2_7B", "1", "flash"]
        time_s = START_S + 137_438_953_472 / RATE  # Primus' FLOPs of it, causal
        assert float(llama["fwd_time"]) == pytest.approx(time_s)
        assert float(llama["fwd_tflops"]) == pytest.approx(0.137438953472 / time_s)
        assert float(llama["bwd_time"]) == pytest.approx(START_S + 2.5 * 137_438_953_472 / RATE)
        (v3,) = (name for name in names if name.lower().replace("-", "_").endswith("v3"))
        deepseek = by_key[v3, "8", "flex"]
        assert (deepseek["head_dim_qk"], deepseek["head_dim_v"]) == ("192", "128")
        forward = 8 * 2_748_779_069_440
        assert float(deepseek["fwd_time"]) == pytest.approx(START_S + forward / RATE)

    def test_a_lost_backward_leaves_the_forward(self, here):
        shape = {"batch": 1, "q_len": 128, "kv_len": 128, "heads": 6, "kv_heads": 6}
        here.append(Attention(**shape, head_dim=64, direction="backward", dtype="fp32"))
        options = "--model gpt-30m --backend math --report-csv-path a.csv"
        assert measure(f"attention {options}") == 4
        (row,) = rows("a.csv")[1]
        assert row["fwd_time"] and (row["bwd_time"], row["bwd_tflops"]) == ("", "")


class TestCollectives:
    COLUMNS = "Model,MBS,Seq,HiddenSize,DataType,{}Time(s),Bandwidth(GB/s)"
    FILES = {  # columns in the place of the braces; busbw / (size / time) on two ranks
        "allreduce": ("WorldSize,", 1.0),
        "allgather": ("WorldSize,", 0.5),
        "reducescatter": ("WorldSize,", 0.5),
        "send_recv": ("", 1.0),
        "all2all": ("EP-Size,TopK,", 0.5),
    }

    def test_five_files_of_the_usual_models_at_eight_batches(self):
        assert measure("collectives --report-dir-path out --as-measured --dtype fp16") == 0
        assert {path.name for path in Path("out").iterdir()} == {
            f"{name}_benchmark.csv" for name in self.FILES
        }
        for name, (columns, factor) in self.FILES.items():
            header, found = rows(f"out/{name}_benchmark.csv")
            assert header == self.COLUMNS.format(columns)
            models = {row["Model"] for row in found}
            assert len(models) == 8  # of all-to-all Qwen3 at two lengths
            assert len(found) == (72 if name == "all2all" else 64)
            row = next(r for r in found if (r["Model"], r["MBS"]) == ("mixtral-8x22b", "3"))
            assert (row["Seq"], row["HiddenSize"], row["DataType"]) == (
                "128", "6144", "torch.float16",
            )  # fmt: skip
            size = 3 * 128 * 6144 * 2 * (2 if name == "all2all" else 1)  # each token to 2 experts
            time_s = START_S + size / RATE
            assert float(row["Time(s)"]) == pytest.approx(time_s)
            assert float(row["Bandwidth(GB/s)"]) == pytest.approx(factor * size / time_s / 1e9)
            if name == "all2all":
                assert (row["EP-Size"], row["TopK"]) == ("2", "2")

    def test_a_dense_model_needs_no_all_to_all(self, here):
        size = 128 * 384 * 4
        here.append(Collective(kind="all_gather", size_bytes=size, group_size=2, dtype="fp32"))
        assert measure("collectives --model gpt-30m --report-dir-path out --as-measured") == 4
        assert sorted(path.name for path in Path("out").iterdir()) == [
            f"{name}_benchmark.csv" for name in ("allgather", "allreduce", "reducescatter",
                                                 "send_recv")
        ]  # fmt: skip
        (row,) = rows("out/allgather_benchmark.csv")[1]
        assert (row["Time(s)"], row["Bandwidth(GB/s)"]) == ("", "")


def test_fsdp_units_are_whole_and_of_the_dtype_that_is_sent():
    reports = "--allgather-report-csv-path ag.csv --reducescatter-report-csv-path rs.csv"
    assert measure(f"fsdp --model gpt-30m --dtype bf16 --reduce-dtype fp32 {reports}") == 0
    layer = 12 * 384**2 + 13 * 384  # weights, biases and norms of a layer
    rest = (51200 + 1024 + 2) * 384  # embedding (tied), positions, last norm
    for path, dtype, size in (("ag.csv", "torch.bfloat16", 2), ("rs.csv", "torch.float32", 4)):
        header, found = rows(path)
        assert header == "Model,Layer Weight,DataType,WorldSize,Time(s),Bandwidth(GB/s)"
        weights = {int(row["Layer Weight"]) for row in found}
        assert weights == {layer, rest}
        for row in found:
            assert (row["Model"], row["DataType"], row["WorldSize"]) == ("gpt-30m", dtype, "2")
            size_bytes = size * int(row["Layer Weight"])
            time_s = START_S + size_bytes / RATE
            assert float(row["Bandwidth(GB/s)"]) == pytest.approx(size_bytes / 2 / time_s / 1e9)
