"""svdq bench model, on a CPU and a small shape."""

import json

import pytest


def test_the_variants_of_a_cpu_and_their_bytes(svdq, tmp_path):
    result = svdq("bench", "model", "--shape", "tiny", "--tokens", "20", "--steps", "2", "--json", tmp_path / "b.json")
    assert (result.code, result.err) == (0, "")
    facts = json.loads((tmp_path / "b.json").read_text())
    assert [row["variant"] for row in facts["rows"]] == ["FP32 eager", "W4A4 eager"]
    plain, quantized = facts["rows"]
    # q 256, k, v 128 by 128; o 128 by 256; gate, up 256 by 128; down 128 by 256: in float32
    assert plain["linear_bytes"] == 2 * 4 * (256 * 128 + 2 * 128 * 128 + 128 * 256 + 3 * 256 * 128)
    values = (
        256 * 128 + 2 * 128 * 128 + 128 * 256 + 3 * 256 * 128
    )  # codes, scales, low rank of 16 in float16, 1 / smooth
    low_rank = 16 * 2 * ((256 + 2 * 128 + 3 * 128) + (128 + 256) + (2 * 256 + 2 * 128) + (128 + 256))
    siblings = 4 * (4 + 4)  # tiles of 128 columns: where their columns of t begin
    per_layer = values // 2 + values // 64 * 2 + low_rank + 4 * (128 + 256 + 128 + 256) + siblings
    assert quantized["linear_bytes"] == 2 * per_layer
    assert all(row["ms_per_step"] > 0 and row["peak_bytes"] is None for row in facts["rows"])
    assert "W4A4 eager" in result.out and "speed-up over FP32 eager" in result.out


@pytest.mark.parametrize(("arguments", "words"), [
    (["--shape", "huge"], "shape 'huge': wanted qwen3-0.6b, llama-8b, tiny"),
    (["--shape", "tiny", "--tokens", "3"], "3 tokens are too few for 4 sequences"),
])  # fmt: skip
def test_mistakes_are_one_line(refused, arguments, words):
    assert words in refused("bench", "model", *arguments)
