"""``show pattern``: its tables against a golden file, warnings in words, the picture, bad input."""

import io
import json
import re
import xml.etree.ElementTree as xml

import numpy as np
import pytest

from meshwise.attention import cover, shards
from meshwise.cli import app
from meshwise.pages import pattern as page
from meshwise.pages import svg, table
from meshwise.spec.long_attention import Dilation, LongAttention

SOURCE = "show pattern --segment-lengths 2048,4096,8192 --dilation-rates 1,2,4 --seq-len 16384"


def call(command: str) -> int:
    with pytest.raises(SystemExit) as ended:
        app.main(command.split())
    return ended.value.code


def op(widths=None, rates=None, **given) -> LongAttention:
    sizes = {"batch": 1, "seq_len": 64, "heads": 4, "kv_heads": 4, "head_dim": 8} | given
    rule = {name: sizes.pop(name) for name in ("offsets", "offset_heads") if name in sizes}
    dilation = None
    if widths:
        dilation = Dilation(segment_lengths=tuple(widths), dilation_rates=tuple(rates), **rule)
    return LongAttention(dilation=dilation, **sizes)


def told(of: LongAttention, ranks: int = 4) -> str:
    return "\n".join(page.warnings(cover.of(of, shards.contiguous(of.seq_len, ranks))))


def test_the_tables_are_as_recorded(golden):
    stream = io.StringIO()
    for of, ranks in (
        (op([16, 32, 64], [1, 2, 4], seq_len=256, causal=True), 8),
        (op([24, 64], [2, 8], seq_len=128, kv_heads=2), 4),
        (op(seq_len=128, causal=True), 1),
    ):
        table.write(page.of(cover.of(of, shards.contiguous(of.seq_len, ranks))), stream)
    golden("pattern.txt", stream.getvalue())


def test_a_pattern_without_a_fault_has_no_warning():
    assert told(op([8, 16], [1, 2], seq_len=16), ranks=1) == ""


@pytest.mark.parametrize(
    ("of", "words"),
    [
        (op([64], [2]), "row 1 of head 0 is kept by no branch: its out is 0"),
        (op([64], [8]), "token 4 is kept by no head at all"),
        (op([64], [8]), "branch 0: the rate is more than the 4 heads"),
        (op([8], [1]), "tokens before and after 8 never meet: no segment crosses it"),
        (op([8, 64], [1, 2], causal=True), "token 8 never knows of token 7"),
        (op([32, 64], [1, 1]), "branches 0, 1: segments are longer than a shard"),
        (op([12], [1]), "branch 0: segments of 12 are not aligned with the shards"),
        (op([64], [1], kv_heads=2), "--offset-heads kv lets them keep the same"),
    ],
)
def test_what_may_not_be_meant_is_said_in_words(of, words):
    assert words in told(of)


def test_a_local_pattern_of_query_heads_that_share_rows_says_nothing_of_exchange():
    said = told(op([16], [1], kv_heads=2, offset_heads="kv"))
    assert "exchange" not in said and "offset-heads" not in said


def test_the_command_prints_tables_whichever_way_flags_are_written(capsys):
    assert call(SOURCE + " --ranks 8") == 0
    first = capsys.readouterr().out
    spaced = "--segment_lengths 2048 4096 8192 --dilation_rates 1 2 4 --seq_len 16384 --ranks 8"
    assert call(f"show pattern {spaced}") == 0
    assert capsys.readouterr().out == first
    assert "Dilated 2048/1 4096/2 8192/4" in first and "17.2 % of all" in first


def test_the_command_tells_all_as_json(capsys):
    assert call(SOURCE + " --batch 2 --dtype fp16 --ranks 4 --json") == 0
    found = json.loads(capsys.readouterr().out)
    # the other half of the segments of 8192, at rate 4: K and V, 12 heads x 64, fp16, batch 2
    assert found["bound_bytes"] == [(8192 - 4096) // 4 * 2 * 2 * 12 * 64 * 2] * 4
    assert found["op"]["dilation"]["segment_lengths"] == [2048, 4096, 8192]
    assert found["path"] == {
        "layers": None, "kind": "never", "wall": 8192, "gap": None, "final_share": None,
        "final_layers": None,
    }  # fmt: skip


def test_without_segments_attention_is_dense(capsys):
    assert call("show pattern --seq-len 4096 --causal --zigzag --ranks 4") == 0
    out = capsys.readouterr().out
    assert out.startswith("Dense: 1 x 4,096 tokens, 12 heads x 64, bf16, causal")
    assert re.search(r"work of ranks, own queries +equal", out) and "Branches" not in out


def test_a_window_is_in_what_a_ring_is_said_to_send(capsys):
    flags = "--batch 2 --dtype fp16 --causal --window 1024 --ranks 4"
    assert call(f"show pattern --seq-len 16384 {flags}") == 0
    out = capsys.readouterr().out
    # the 1023 keys before a shard, K and V: 2 x 2 x 12 x 64 numbers of 2 bytes each
    assert re.search(r"dense attention, ring +6.29 MB", out)
    assert re.search(r"dense attention, gather +75.5 MB", out) and "window 1,024" in out


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            "--segment-lengths 8,x --dilation-rates 1,2",
            "--segment-lengths = 'x': must be a whole number",
        ),
        ("--segment-lengths 8 --dilation-rates 1,2", "must be as many as segment_lengths"),
        ("--segment-lengths 0 --dilation-rates 1", "--segment-lengths = (0,): each must be >= 1"),
        ("--dilation-rates 1", "give one segment length and one dilation rate a branch"),
        ("--heads 12 --kv-heads 5", "error: --kv-heads = 5: must divide heads = 12"),
        ("--ranks 0", "--ranks = 0: must be >= 1 and <= 1024"),
        ("--seq-len 4 --ranks 8", "--ranks = 8: must be 1 to 4"),
        ("--seq-len 1000000000", "--seq-len = 1000000000: must be >= 1 and <= 16777216"),
        ("--seq-len 0", "--seq-len = 0: must be >= 1"),
        ("--segment-lengths --dilation-rates 1", "--segment-lengths"),
        ("--window 8", "only causal attention has a window; set causal"),
        ("--segment-lengths 8 --dilation-rates 1 --zigzag", "is for contiguous shards"),
        ("--seq-len 64 --figure /dev/null/a.svg", "/dev/null/a.svg cannot be written"),
        ("--seq-len 64 --figure a.gif", "figure = 'a.gif': let its name end in .svg, .png or .pdf"),
    ],
)
def test_bad_input_is_one_line_with_the_field(flags, says, capsys):
    assert call(f"show pattern {flags}") == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


@pytest.mark.parametrize("causal", [False, True])
def test_the_picture_of_a_head_fills_the_pairs_that_attend_and_no_others(causal):
    drawn = page.panels(op([8, 32], [2, 3], seq_len=32, causal=causal))
    assert len(drawn) == 3  # no blocks: all tokens are shown; three heads
    p, x = np.arange(32)[:, None], np.arange(32)[None, :]
    for head, panel in enumerate(drawn):
        meant = np.zeros((32, 32), dtype=bool)
        for w, r in ((8, 2), (32, 3)):
            meant |= (p // w == x // w) & (p % w % r == head % r) & (x % w % r == head % r)
        meant &= (x <= p) if causal else True
        assert np.array_equal(panel.branch >= 0, meant)
        assert (panel.strength[meant] > 0).all()


def test_a_window_is_left_out_of_the_picture():
    (panel,) = page.panels(op(seq_len=32, causal=True, window=5))
    p, x = np.arange(32)[:, None], np.arange(32)[None, :]
    assert np.array_equal(panel.branch >= 0, (x <= p) & (x > p - 5))


def test_the_blocks_are_those_that_some_head_joins_and_ranks_are_drawn(tmp_path, capsys):
    path = tmp_path / "who.svg"
    flags = "--segment-lengths 128,512 --dilation-rates 1,4 --seq-len 1024 --ranks 4 --causal"
    assert call(f"show pattern {flags} --figure {path}") == 0
    assert f"wrote {path}" in capsys.readouterr().err
    xml.parse(path)
    assert "1,024 tokens, all heads" in path.read_text()
    blocks, *_ = page.panels(op([128, 512], [1, 4], seq_len=1024, heads=12, causal=True))
    b = np.arange(64)  # of 16 tokens: segments of 8 and 32 blocks
    meant = (b[:, None] // 32 == b[None, :] // 32) & (b[:, None] >= b[None, :])
    assert np.array_equal(blocks.branch >= 0, meant)


def words(of, where):
    drawn = svg.standalone(page.figure(of, where))
    space = "{http://www.w3.org/2000/svg}"
    return [each.text for each in xml.fromstring(drawn).iter(f"{space}text")]


def test_the_legend_is_of_what_is_drawn():
    dilated = words(op([16, 64], [1, 2]), shards.contiguous(64, 1))
    assert "Colour: the shortest segment" in dilated
    assert not any(word.startswith("Dashed") for word in dilated)
    dense = words(op(seq_len=4096, causal=True, window=512), shards.contiguous(4096, 4))
    assert not any(word.startswith("Colour") for word in dense)
    assert "The window of 512 reaches beyond the first 48 tokens." in " ".join(dense)
    narrow = words(op(seq_len=4096, causal=True, window=16), shards.contiguous(4096, 4))
    assert "The window of 16 is less than a block of 64 tokens." in " ".join(narrow)


def test_every_chunk_of_a_zigzag_has_the_number_of_its_rank():
    of = op(seq_len=32, causal=True, order="zigzag")
    found = [word for word in words(of, shards.zigzag(32, 4)) if word.isdecimal()]
    assert sorted(found) == sorted("01233210")
