"""show: clusters and models by name, a config.json, the steps of a training."""

import json
import re
from pathlib import Path

import pytest

import meshwise
from meshwise.cli import app

STORED = Path(__file__).resolve().parents[2] / "benchmarks/2026-11-27-sums-over-two-axes/runs"


def shown(words: str, capsys) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        app.main(["show", *words.split()])
    said = capsys.readouterr()
    return ended.value.code, said.out, said.err


@pytest.mark.parametrize(
    ("name", "published", "active"),
    [("llama-3-8b", "8.03 B", "7.50 B"), ("mixtral-8x7b", "46.7 B", "12.7 B")],
)
def test_a_model_has_its_published_parameters_and_they_add_up(name, published, active, capsys):
    code, out, _ = shown(name, capsys)
    assert code == 0
    assert re.search(rf"^parameters +{published}$", out, re.M)
    assert re.search(rf"^a token is multiplied with +{active}$", out, re.M)
    shares = re.findall(r"([\d.]+) %$", out, re.M)
    assert sum(map(float, shares)) == pytest.approx(100, abs=0.5)


def test_a_config_of_hugging_face_is_shown_from_its_folder(tmp_path, capsys):
    config = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
        "intermediate_size": 128, "vocab_size": 256, "max_position_embeddings": 64,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, out, _ = shown(f"{tmp_path} --json", capsys)
    assert code == 0 and json.loads(out)["layers"] == 3
    code, out, _ = shown(str(tmp_path / "config.json"), capsys)
    assert re.search(r"layers\.\*\.up\.weight +128 x 64 +3 ", out)


def test_a_cluster_is_shown_by_its_name(capsys):
    code, out, err = shown("h100-hgx", capsys)
    assert code == 0 and "NVIDIA H100" in out and "comes with Meshwise" in err


@pytest.mark.parametrize(
    ("name", "hint"),
    [("lama-3-8b", "did you mean llama-3-8b?"), ("zzz", "show reads cluster.toml")],
)
def test_an_unknown_name_gets_the_nearest(name, hint, capsys):
    code, out, err = shown(name, capsys)
    assert (code, out) == (2, "") and hint in err


def test_the_steps_of_a_training_are_a_table(capsys):
    (file, *_) = sorted(STORED.glob("*/steps.jsonl"))
    found = meshwise.show(file)
    assert len(found.steps) == len(file.read_text().splitlines())
    code, out, _ = shown(str(file), capsys)
    assert code == 0 and re.search(rf"^{found.steps[0].step} +[\d.]+ m?s", out, re.M)
