"""benchmarks/encoder.py and peers.py: sentences, embeddings, their comparison, rows of tokens, tables."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def modules():
    before = list(sys.path)
    sys.path.append(str(BENCHMARKS))
    try:
        yield {name: importlib.import_module(name) for name in ("embeddings", "encoder", "peers", "peers_table")}
    finally:
        sys.path[:] = before


@pytest.fixture
def embeddings(modules):
    return modules["embeddings"]


@pytest.fixture
def encoder(modules):
    return modules["encoder"]


# ---- embeddings


def test_the_embedding_is_the_mean_over_the_tokens_and_has_length_1(embeddings):
    states = torch.tensor([[[2.0, 0.0], [4.0, 8.0], [7.0, 7.0]]])
    found = embeddings.pool(states, torch.tensor([[1, 1, 0]]))  # mean (3, 4)
    torch.testing.assert_close(found, torch.tensor([[0.6, 0.8]]))


def test_not_even_an_infinite_state_at_padding_reaches_the_embedding(embeddings):
    states = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    spoilt = states.clone()
    spoilt[1, 2:] = torch.inf
    assert torch.equal(embeddings.pool(spoilt, mask), embeddings.pool(states, mask))


@pytest.mark.parametrize("one_shape", [False, True])
def test_embeddings_come_in_the_order_of_the_sentences_whatever_their_lengths(embeddings, one_shape):
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 9, (23,), generator=generator)
    ids = torch.randint(1, 50, (23, 8), generator=generator)
    mask = (torch.arange(8) < lengths[:, None]).long()
    table, shapes = torch.randn(50, 4, generator=generator), set()

    def model(input_ids, attention_mask):
        shapes.add(tuple(input_ids.shape))
        return SimpleNamespace(last_hidden_state=table[input_ids])

    found = embeddings.embed(model, ids * mask, mask, one_shape=one_shape)
    means = torch.stack([table[row[:length]].mean(dim=0) for row, length in zip(ids, lengths, strict=True)])
    torch.testing.assert_close(found, means / means.norm(dim=1, keepdim=True))
    assert (shapes == {(10, 8)}) is one_shape


def test_equal_values_share_the_mean_of_their_ranks(embeddings):
    assert embeddings.ranks(torch.tensor([30.0, 10.0, 20.0, 10.0])).tolist() == [4.0, 1.5, 3.0, 1.5]


def test_spearman_of_a_known_case(embeddings):
    # Without ties it is 1 - 6 sum(d^2) / (n (n^2 - 1)); ranks 1 2 3 4 5 against 2 1 4 3 5: d^2 sums to 4
    first, second = torch.tensor([1.0, 10.0, 11.0, 30.0, 31.0]), torch.tensor([5.0, 4.0, 8.0, 7.0, 900.0])
    assert embeddings.spearman(first, second) == pytest.approx(1 - 6 * 4 / (5 * 24))
    assert embeddings.spearman(first, -first) == pytest.approx(-1)


def test_the_comparison_takes_cosines_by_sentence_and_ranks_over_pairs(embeddings):
    angles = torch.tensor([0.0, 20.0, 50.0, 90.0])
    turned = angles + torch.tensor([0.0, 0.0, 0.0, 60.0])  # the last sentence moves away: no pair changes its rank

    def unit(degrees):
        return torch.stack([degrees.deg2rad().cos(), degrees.deg2rad().sin()], dim=1)

    found = embeddings.compare(unit(angles), unit(turned))
    assert found["cosine_mean"] == pytest.approx((3 + 0.5) / 4)
    assert found["cosine_p5"] == pytest.approx(0.5 + 0.5 * 0.15)  # a twentieth of the way through three steps
    assert found["spearman"] == pytest.approx(1 - 6 * 2 / (6 * 35))  # 40 degrees apart become 100, past 90


def test_each_file_of_sentences_has_its_own_figures(embeddings, tmp_path):
    for name, text in (("a", "One.\nTwo.\nThree.\n"), ("b", "Four.\nFive.\nSix.\n")):
        (tmp_path / f"{name}.txt").write_text(text)
    sentences, digests = embeddings.read_sentences([tmp_path / "a.txt", tmp_path / "b.txt"])
    assert (
        sentences == {"a": ["One.", "Two.", "Three."], "b": ["Four.", "Five.", "Six."]} and digests["a"] != digests["b"]
    )
    original = torch.eye(6)
    found = embeddings.compare_files(sentences, original, original[[0, 1, 2, 4, 5, 3]])
    assert found["a"]["cosine_mean"] == 1 and found["b"]["cosine_mean"] == 0


# ---- encoder.py


def test_a_paragraph_is_split_where_a_sentence_ends(encoder):
    text = """Mr. Elliot of Kellynch Hall was there, e.g. on Monday. "Was he really there again?" Nobody (as it
seemed) knew that at all. Too short.

Not ended like a sentence of many words"""
    assert encoder.split_sentences(text) == [
        "Mr. Elliot of Kellynch Hall was there, e.g. on Monday.",
        "Nobody (as it seemed) knew that at all.",
    ]


def test_sentences_are_spread_over_the_text_and_never_in_the_calibration(encoder):
    all_of_them = [f"This is sentence number {number} of them." for number in range(10)]
    texts = {"a": " ".join(all_of_them), "b": "This one is of another text."}
    calibration = f"Words before it.\n{all_of_them[0][:7]}\n{all_of_them[0][8:]} Words after it."
    picked = encoder.pick_sentences(texts, calibration, {"a": 3, "b": 1})
    assert picked == [all_of_them[1], all_of_them[4], all_of_them[7], texts["b"]]
    with pytest.raises(SystemExit, match="a: 9 sentences, wanted 10"):
        encoder.pick_sentences(texts, calibration, {"a": 10})


def test_rows_that_share_a_store_are_calibrated_once_and_a_failure_stops_its_row_only(encoder, tmp_path, monkeypatch):
    seen = []

    def run_svdq(settings, scratch, name, *arguments):
        seen.append(name)
        if name == "calibrate":
            return {"warnings": [], "tokens": 64}, 1.0
        if "--rank" in arguments:
            raise encoder.CommandFailed(name, "no such rank")
        arguments[1].write_bytes(b"four")
        return {"mean_error": 0.1, "layers": {"one": {}}, "repairs": [], "warnings": []}, 2.0

    monkeypatch.setattr(encoder, "run_svdq", run_svdq)
    settings = encoder.Settings(tmp_path, tmp_path, {"calibration": tmp_path}, "cpu", 2, 0, 1, [], {})
    rows = [row for row in encoder.ROWS if row.key in ("rank0", "quality", "plain")]
    figures = dict.fromkeys(encoder.FIGURES, 0.99)
    measured = {name: figures for name in encoder.SENTENCES}
    runs, failures = encoder.run_all(settings, rows, [0], lambda checkpoint: measured)
    assert seen.count("calibrate") == 2  # plain's, and that of the other two
    assert failures == [{"row": "rank0", "seed": 0, "command": "quantize"}] and not runs["rank0"]
    assert runs["quality"][0]["linears"] == 1 and runs["quality"][0]["bytes"] == 4
    summary = encoder.summarize(runs["quality"].values())
    bars = encoder.check_bars({"quality": summary})
    assert [bar["met"] for bar in bars] == [True, True]
    summary["in_domain"]["cosine_mean"]["mean"] = 0.983
    assert [bar["met"] for bar in encoder.check_bars({"quality": summary})] == [True, False]
    assert [bar["met"] for bar in encoder.check_bars({})] == [None, None]
    shown = encoder.figures_text({"default": summary}, 1).splitlines()
    assert shown[1].split() == ["default", "0.9830", *["0.9900"] * 5, "10.00"]


# ---- peers.py


def test_an_encoders_rows_stand_between_cls_and_sep(modules, tmp_path):
    class Tokenizer:
        cls_token_id, sep_token_id = 101, 102

        def __call__(self, text, add_special_tokens=True, **options):
            return {"input_ids": [int(word) for word in text.split()]}

    (tmp_path / "t.txt").write_text("1 2 3 4 5 6 7")
    rows = modules["peers"].read_rows(Tokenizer(), tmp_path / "t.txt", 5, encoder=True)
    assert rows.tolist() == [[101, 1, 2, 3, 102], [101, 4, 5, 6, 102]]


def test_the_levels_of_a_product_are_counted_on_both_operands(modules):
    weight = torch.randint(-7, 8, (3, 128), generator=torch.Generator().manual_seed(0)).float()
    model = torch.nn.Linear(128, 3, bias=False)
    model.weight.data = weight
    fine = torch.randn(2, 128, generator=torch.Generator().manual_seed(1))
    coarse = fine.sign()
    assert modules["peers"].count_w4a4(model, {"input": coarse}) == (1, [])
    assert modules["peers"].count_w4a4(model, {"input": fine}) == (0, [(3, 128)])


def test_the_table_of_peers_keeps_models_and_texts_apart(modules):
    texts = ("in_domain", "kjv", "novel")

    def words(ratio, sha):
        found = {name: {"ratio": value, "sha256": sha} for name, value in zip(texts, ratio, strict=True)}
        return {"model": "llm", "seconds": 12.3, "perplexity": found}

    figures = {"cosine_mean": 0.9, "cosine_p5": 0.8, "spearman": 0.7, "sha256": "s"}
    results = {
        "worse": words((1.5, 1.6, 1.7), "s"),
        "better": words((1.25, 1.2, 1.8), "s"),
        "other-text": words((1.0, 1.0, 1.0), "t"),
        "encoder": {"model": "bert", "seconds": 1, "embeddings": {"in_domain": figures}},
    }
    first, second, third = modules["peers_table"].tables(results).split("\n\n")
    assert [line.split()[0] for line in first.splitlines()] == ["llm", "better", "worse"]
    assert first.splitlines()[1].split() == ["better", "1.250", "1.200", "1.800", "1.470", "12"]  # sqrt(1.2 * 1.8)
    assert second.splitlines()[1].startswith("other-text")
    assert third.splitlines()[1].split() == ["encoder", "0.9000", "0.8000", "0.7000", "1"]
