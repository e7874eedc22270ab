"""Token data: every kind of source, no padding, a draw that repeats itself, and one-line errors."""

import hashlib
import json
import random
import struct
import time

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from svdq.calibration import data
from svdq.calibration.data import batches, check_source, load_tokenizer, load_tokens
from svdq.errors import ConfigError, DataError, SvdqError

WORDS = ["<unk>", "<bos>", "<eos>", "<cls>", "<sep>", "\n", *"abcdefghij"]
ID = {word: i for i, word in enumerate(WORDS)}
NL = ID["\n"]
CHAT = "{% for m in messages %}{{ m['role'][0] }} {{ m['content'] }}\n{% endfor %}"


def make_tokenizer(*, eos=False, bos=False, bert=False, chat=None):
    """One id a word and one a line end, so that the expected ids can be written down by hand."""
    core = Tokenizer(models.WordLevel(ID, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.Split(Regex("\n"), "isolated")]
    )
    names = {}
    if eos:
        names["eos_token"] = "<eos>"
    if bos:
        names["bos_token"] = "<bos>"
        core.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    if bert:
        names |= {"cls_token": "<cls>", "sep_token": "<sep>"}
        core.post_processor = processors.TemplateProcessing(
            single="<cls> $A <sep>", special_tokens=[("<cls>", 3), ("<sep>", 4)]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", **names)
    tokenizer.chat_template = chat
    return tokenizer


PLAIN = make_tokenizer()


def load(source, tokenizer=PLAIN, *, samples=64, seq_len=64, min_tokens=1, seed=0, **more):
    return load_tokens(
        str(source), tokenizer, samples=samples, seq_len=seq_len, min_tokens=min_tokens, seed=seed, **more
    )


def ids_of(found):
    return [sequence.tolist() for sequence in found.sequences]


def ids(words):
    return [ID[word] for word in words]


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def jsonl(path, rows):
    return write(path, "".join(json.dumps(row) + "\n" for row in rows))


def says(message, *parts):
    """A one-line error that holds every part."""
    assert "\n" not in message
    for part in parts:
        assert part in message, f"{part!r} not in {message!r}"


def refuse(source, *parts, tokenizer=PLAIN, **more):
    with pytest.raises(DataError) as caught:
        load(source, tokenizer, **more)
    says(str(caught.value), *parts)


# ---- text: rows joined, nothing padded


def test_lines_of_a_text_file_are_joined_by_line_ends(tmp_path):
    assert ids_of(load(write(tmp_path / "x.txt", "a b\nc\n"))) == [[ID["a"], ID["b"], NL, ID["c"]]]


def test_seventy_percent_blank_lines_are_skipped_and_counted(tmp_path):
    found = load(write(tmp_path / "x.txt", "\n \t\n\r\n\n\na\n\nb\n\nc\n"))
    assert ids_of(found) == [[ID["a"], NL, ID["b"], NL, ID["c"]]]
    assert (found.rows_found, found.rows_blank, found.rows_used) == (10, 7, 3)


def test_five_short_lines_become_one_long_sequence(tmp_path):
    found = load(write(tmp_path / "x.txt", "a b\n" * 5), seq_len=2048)
    assert (len(found.sequences), found.tokens) == (1, 14)  # 10 words and 4 line ends between them


def test_short_rows_share_a_sequence(tmp_path):
    found = load(jsonl(tmp_path / "x.jsonl", [{"text": c} for c in "abcde"]), seq_len=3)
    assert ids_of(found) == [ids("abc"), ids("de")]


def test_a_last_piece_of_one_token_is_left_out(tmp_path):
    assert ids_of(load(write(tmp_path / "x.txt", "a b c d e"), seq_len=2)) == [ids("ab"), ids("cd")]


def test_too_few_tokens_name_found_wanted_and_the_option(tmp_path):
    path = write(tmp_path / "x.txt", "a b\n\nc\n")
    refuse(
        path,
        "x.txt",
        "found 4 tokens",
        "2 rows",
        "1 blank",
        "at least 100",
        "more text",
        "--min-tokens",
        min_tokens=100,
    )


def test_a_request_below_min_tokens_is_told_to_ask_for_more(tmp_path):
    refuse(write(tmp_path / "x.txt", "a " * 99), "raise --samples", samples=1, seq_len=8, min_tokens=50)


def test_the_summary_names_rows_and_tokens(tmp_path):
    path = write(tmp_path / "x.txt", "a b\n\n" * 1000)
    assert load(path, samples=32, seq_len=512).summary() == (
        f"{path}: 1,000 rows used of 2,000 (1,000 blank); 2,999 of 16,384 requested tokens in 6 sequences of up to 512"
    )


def test_a_byte_order_mark_is_not_text(tmp_path):
    assert ids_of(load(write(tmp_path / "x.txt", b"\xef\xbb\xbfa b"))) == [ids("ab")]


def test_a_long_line_is_cut_without_losing_a_word(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "_PIECE", 7)
    words = "abcdefghij" * 5
    assert ids_of(load(write(tmp_path / "x.txt", " ".join(words)), seq_len=100)) == [ids(words)]


def test_long_texts_are_cut_at_line_ends_and_are_one_document(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "_PIECE", 8)
    found = load(write(tmp_path / "x.txt", "a b\nc d\ne f"), make_tokenizer(eos=True, bos=True))
    assert ids_of(found) == [[1, *ids("ab"), NL, *ids("cd"), NL, *ids("ef")]]


def test_reading_stops_at_the_budget(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "_MAX_READ", 3)
    assert load(jsonl(tmp_path / "x.jsonl", ["a b", "c d", "e f"])).rows_found == 1


# ---- special tokens


def test_documents_are_separated_by_eos(tmp_path):
    path = jsonl(tmp_path / "x.jsonl", [{"text": "a b"}, {"text": "c"}])
    assert ids_of(load(path, make_tokenizer(eos=True))) == [[*ids("ab"), ID["<eos>"], ID["c"]]]


def test_a_tokenizer_without_eos_pad_and_bos_joins_without_a_separator(tmp_path):
    assert PLAIN.eos_token_id is None and PLAIN.pad_token_id is None
    path = jsonl(tmp_path / "x.jsonl", [{"text": "a b"}, {"text": "c"}])
    assert ids_of(load(path)) == [ids("abc")]


def test_each_document_begins_with_bos_if_the_tokenizer_adds_it(tmp_path):
    path = jsonl(tmp_path / "x.jsonl", [{"text": "a b"}, {"text": "c"}])
    assert ids_of(load(path, make_tokenizer(bos=True, eos=True))) == [[1, *ids("ab"), 2, 1, ID["c"]]]


def test_a_bos_in_the_text_is_not_doubled(tmp_path):
    path = jsonl(tmp_path / "x.jsonl", [{"text": "<bos> a"}])
    assert ids_of(load(path, make_tokenizer(bos=True))) == [[1, ID["a"]]]


def test_a_bos_that_the_tokenizer_does_not_add_stays_out(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.bos_token = "<bos>"
    assert ids_of(load(write(tmp_path / "x.txt", "a b"), tokenizer)) == [ids("ab")]


def test_encoder_sequences_are_wrapped_within_seq_len(tmp_path):
    found = load(write(tmp_path / "x.txt", "a b c d e"), make_tokenizer(bert=True), seq_len=4)
    assert ids_of(found) == [[3, *ids("ab"), 4], [3, *ids("cd"), 4], [3, ID["e"], 4]]


def test_an_encoder_without_room_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"--seq-len 2.*at least 3"):
        load(write(tmp_path / "x.txt", "a b"), make_tokenizer(bert=True), seq_len=2)


def test_truncation_and_padding_stored_with_the_tokenizer_are_ignored(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=9)
    assert ids_of(load(write(tmp_path / "x.txt", "a b c d"), tokenizer)) == [ids("abcd")]


def test_no_warning_about_texts_longer_than_the_model(tmp_path, capfd, caplog):
    tokenizer = make_tokenizer()
    tokenizer.model_max_length = 4
    load(write(tmp_path / "x.txt", "a b c d e f g h"), tokenizer)
    assert capfd.readouterr() == ("", "") and not caplog.records


def test_ids_beyond_the_models_vocabulary_are_refused(tmp_path):
    refuse(write(tmp_path / "x.txt", "a j"), "gives id 15", "has 10", "belongs to the model", vocab_size=10)


# ---- kinds of source


def test_a_jsonl_row_may_be_a_bare_string(tmp_path):
    assert ids_of(load(write(tmp_path / "x.jsonl", '"a b"\n\n"c"\n'))) == [ids("abc")]


@pytest.mark.parametrize(
    "text", ['[{"text": "a b"}, {"text": " "}, {"text": "c"}]', '{"text":"a b"}\n\n{"text":"c"}\n']
)
def test_json_is_a_list_of_rows_or_one_row_a_line(tmp_path, text):
    assert ids_of(load(write(tmp_path / "x.json", text))) == [ids("abc")]


def test_csv_fields_may_hold_commas_and_line_ends(tmp_path):
    assert ids_of(load(write(tmp_path / "x.csv", 'id,text\n1,"a\nb"\n2,c\n3,\n'))) == [[ID["a"], NL, ID["b"], ID["c"]]]


def test_parquet_rows_are_read(tmp_path):
    pyarrow.parquet.write_table(pa.table({"n": [1, 2, 3], "text": ["a b", None, "c"]}), tmp_path / "x.parquet")
    found = load(tmp_path / "x.parquet")
    assert ids_of(found) == [ids("abc")]
    assert (found.rows_found, found.rows_blank) == (3, 1)


def test_the_files_of_a_directory_are_read_by_name(tmp_path):
    write(tmp_path / "b.txt", "c")
    jsonl(tmp_path / "a.jsonl", [{"text": "a b"}])
    write(tmp_path / "README.md", "j j j")
    assert ids_of(load(tmp_path)) == [ids("abc")]


def test_a_saved_dataset_is_read(tmp_path):
    datasets.Dataset.from_dict({"text": ["a b", "", "c"], "n": [1, 2, 3]}).save_to_disk(tmp_path / "d")
    found = load(tmp_path / "d")
    assert ids_of(found) == [ids("abc")]
    assert (found.rows_found, found.rows_blank) == (3, 1)


def test_a_saved_dataset_with_splits_gives_train(tmp_path):
    part = datasets.Dataset.from_dict
    datasets.DatasetDict(test=part({"text": ["i j"]}), train=part({"text": ["a b"]})).save_to_disk(tmp_path / "d")
    assert ids_of(load(tmp_path / "d")) == [ids("ab")]
    assert ids_of(load(tmp_path / "d/test")) == [ids("ij")]


def test_a_saved_dataset_in_torch_format_is_read(tmp_path):
    rows = datasets.Dataset.from_dict({"input_ids": [[6, 7], [8, 9]]}).with_format("torch")
    rows.save_to_disk(tmp_path / "d")
    assert ids_of(load(tmp_path / "d", None)) == [[6, 7], [8, 9]]


def test_a_hub_name_gives_name_config_split_and_column(monkeypatch):
    asked = []

    def load_dataset(*args, **more):
        asked.append((args, more))
        return datasets.Dataset.from_dict({"text": ["j j"], "body": ["a b"]}).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert ids_of(load("some/set:en:validation:body")) == [ids("ab")]
    assert ids_of(load("some/set")) == [ids("jj")]
    assert asked == [
        (("some/set", "en"), {"split": "validation", "streaming": True}),
        (("some/set", None), {"split": "train", "streaming": True}),
    ]


def test_no_more_of_the_hub_is_read_than_a_draw_needs(monkeypatch):
    rows = datasets.Dataset.from_dict({"text": ["a b c d e"] * 1000}).to_iterable_dataset()
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **more: rows)
    assert load("some/set", samples=1, seq_len=2).rows_found == 8  # 9 characters each, 32 for each of 2 tokens


def test_an_unreachable_hub_is_one_line(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refuse("nobody/nothing", "nobody/nothing", "check the name and the network")


def test_content_and_then_the_only_string_column_stand_in_for_text(tmp_path):
    assert ids_of(load(jsonl(tmp_path / "x.jsonl", [{"content": "a b", "title": "j"}]))) == [ids("ab")]
    assert ids_of(load(jsonl(tmp_path / "y.jsonl", [{"quote": None, "n": 1}, {"quote": "a b", "n": 1}]))) == [ids("ab")]


def test_a_column_can_be_named_after_a_local_source(tmp_path):
    path = write(tmp_path / "x.csv", "text,body\nj j,a b\n")
    assert ids_of(load(f"{path}:body")) == [ids("ab")]
    assert ids_of(load(f"{tmp_path}:body")) == [ids("ab")]


# ---- chat


@pytest.mark.parametrize("column", ["messages", "conversations"])
def test_chat_rows_go_through_the_template(tmp_path, column):
    rows = [{column: [{"role": "a", "content": "b"}, {"role": "c", "content": "d"}]}, {column: []}]
    found = load(jsonl(tmp_path / "x.jsonl", rows), make_tokenizer(chat=CHAT))
    assert ids_of(found) == [[*ids("ab"), NL, *ids("cd"), NL]]
    assert found.rows_blank == 1


def test_chat_rows_without_a_template_are_refused(tmp_path):
    path = jsonl(tmp_path / "x.jsonl", [{"messages": [{"role": "a", "content": "b"}]}])
    refuse(path, "line 1", "no chat template", "rows of text")


def test_a_template_that_refuses_names_the_row(tmp_path):
    path = jsonl(tmp_path / "x.jsonl", [{"messages": [{"role": "a", "content": "b"}]}])
    refuse(path, "line 1", "TemplateError: roles", tokenizer=make_tokenizer(chat="{{ raise_exception('roles') }}"))


def test_messages_without_role_name_the_row(tmp_path):
    path = jsonl(tmp_path / "x.jsonl", [{"conversations": [{"from": "a", "value": "b"}]}])
    refuse(path, "line 1", "conversations", "role and content", tokenizer=make_tokenizer(chat=CHAT))


# ---- pre-tokenised rows


def test_pretokenised_rows_need_no_tokenizer_and_stay_apart(tmp_path):
    found = load(jsonl(tmp_path / "x.jsonl", [{"input_ids": [6, 7]}, {"input_ids": [8, 9, 10]}]), None)
    assert ids_of(found) == [[6, 7], [8, 9, 10]]
    assert all(sequence.dtype == torch.int64 for sequence in found.sequences)


def test_pretokenised_parquet_needs_no_tokenizer(tmp_path):
    table = pa.table({"input_ids": [[6, 7], [8, 9]], "attention_mask": [[1, 1], [1, 1]], "text": ["a", "b"]})
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    assert ids_of(load(tmp_path / "x.parquet", None)) == [[6, 7], [8, 9]]


def test_positions_masked_as_padding_are_dropped(tmp_path):
    rows = [{"input_ids": [0, 0, 6, 7], "attention_mask": [0, 0, 1, 1]}, {"input_ids": [0], "attention_mask": [0]}]
    found = load(jsonl(tmp_path / "x.jsonl", rows), None)
    assert ids_of(found) == [[6, 7]]
    assert (found.rows_found, found.rows_blank, found.rows_used) == (2, 1, 1)


def test_a_long_pretokenised_row_is_split(tmp_path):
    found = load(jsonl(tmp_path / "x.jsonl", [{"input_ids": [*range(7)]}, {"input_ids": [5]}]), None, seq_len=3)
    assert ids_of(found) == [[0, 1, 2], [3, 4, 5]]
    assert found.rows_used == 1


@pytest.mark.parametrize("bad", ["true", "1.0", "-1", "[1]", "NaN", "null", '"7"', "100", str(10**40)])
def test_an_id_that_is_no_token_names_file_row_and_position(tmp_path, bad):
    path = write(tmp_path / "x.jsonl", f'{{"input_ids": [1, 2]}}\n{{"input_ids": [1, {bad}]}}\n')
    refuse(path, "x.jsonl, line 2", "input_ids[1]", "from 0 to 99", tokenizer=None, vocab_size=100)


def test_an_id_beyond_64_bits_is_refused_without_a_vocabulary_size(tmp_path):
    refuse(write(tmp_path / "x.jsonl", f'{{"input_ids": [{2**63}]}}'), "line 1", "input_ids[0]", tokenizer=None)


@pytest.mark.parametrize("mask", [[1], [1, 0.5], 1, [1, None]])
def test_a_mask_that_does_not_fit_is_refused(tmp_path, mask):
    refuse(
        jsonl(tmp_path / "x.jsonl", [{"input_ids": [6, 7], "attention_mask": mask}]),
        "line 1",
        "attention_mask",
        "2 zeros",
    )


def test_text_without_a_tokenizer_says_what_to_give(tmp_path):
    refuse(write(tmp_path / "x.txt", "a b"), "x.txt", "no tokenizer files", "input_ids", tokenizer=None)


def test_text_among_pretokenised_rows_is_refused(tmp_path):
    refuse(jsonl(tmp_path / "x.jsonl", [{"input_ids": [6, 7]}, {"text": "a"}]), "line 2", "one kind")


# ---- batches


def test_rows_of_10_and_100_tokens_never_share_a_batch():
    rows = [torch.arange(n) for n in (10, 100, 10, 10, 100, 100)]
    assert [tuple(b.shape) for b in batches(rows, 10_000)] == [(1, 10), (1, 100), (2, 10), (2, 100)]


def test_batches_keep_order_and_stay_within_the_budget():
    rows = [torch.tensor([i, i]) for i in range(5)]
    assert [b.tolist() for b in batches(rows, 5)] == [[[0, 0], [1, 1]], [[2, 2], [3, 3]], [[4, 4]]]


def test_a_sequence_longer_than_the_budget_is_a_batch_of_one():
    assert [tuple(b.shape) for b in batches([torch.arange(9)] * 2, 4)] == [(1, 9), (1, 9)]


# ---- the draw


def numbered(tmp_path, rows=50):
    return jsonl(tmp_path / "n.jsonl", [{"input_ids": [i, i]} for i in range(rows)])


def test_the_draw_is_the_seeded_permutation_in_source_order(tmp_path):
    drawn = torch.randperm(50, generator=torch.Generator().manual_seed(7))[:5].tolist()
    assert ids_of(load(numbered(tmp_path), samples=5, seed=7)) == [[i, i] for i in sorted(drawn)]


def test_rows_of_ids_come_by_length_so_that_equal_ones_share_a_batch(ids_file, read_ids, tmp_path):
    lengths = [30, 20, 30, 20, 25, 30]
    found = read_ids(ids_file(tmp_path / "rows.jsonl", lengths, seed=3)).sequences
    assert [len(row) for row in found] == sorted(lengths)
    rows = [json.loads(line)["input_ids"] for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row.tolist() for row in found] == [rows[i] for i in (1, 3, 4, 0, 2, 5)]
    assert [tuple(batch.shape) for batch in batches(found, 4096)] == [(2, 20), (1, 25), (3, 30)]


def test_another_seed_draws_other_sequences(tmp_path):
    path = numbered(tmp_path)
    assert load(path, samples=5, seed=1).sha256() != load(path, samples=5, seed=2).sha256()


def test_the_same_call_gives_the_same_tokens(tmp_path):
    path = write(tmp_path / "x.txt", "a b c d\ne f\n" * 500)
    assert load(path, samples=5, seq_len=7).sha256() == load(path, samples=5, seq_len=7).sha256()


def test_a_large_source_is_thinned_before_it_is_tokenized(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "_SMALL", 40)
    monkeypatch.setattr(data, "_SURPLUS", 1)
    path = jsonl(tmp_path / "x.jsonl", [f"{first} {second}" for first in "abcdefghij" for second in "abcdefghij"])
    found = load(path, make_tokenizer(eos=True), samples=1, seq_len=41)
    (stream,) = ids_of(found)
    assert stream[2::3] == [ID["<eos>"]] * 13  # 14 rows of 3 characters are the first to reach 41
    rows = list(zip(stream[0::3], stream[1::3], strict=True))
    assert rows == sorted(set(rows)) and rows[-1] > (ID["b"], ID["d"])  # in order, and not the first 14
    assert load(path, make_tokenizer(eos=True), samples=1, seq_len=41).sha256() == found.sha256()


def test_global_random_states_are_untouched(tmp_path):
    path = write(tmp_path / "x.txt", "a b c d\n" * 500)
    datasets.Dataset.from_dict({"text": ["a b"] * 50}).save_to_disk(tmp_path / "d")
    before = torch.initial_seed(), torch.get_rng_state(), random.getstate(), repr(np.random.get_state())
    load(path, samples=5, seq_len=7)
    load(tmp_path / "d", samples=5, seq_len=7)
    assert torch.initial_seed() == before[0] and torch.equal(torch.get_rng_state(), before[1])
    assert random.getstate() == before[2] and repr(np.random.get_state()) == before[3]


def test_the_digest_is_of_lengths_and_ids_in_little_endian(tmp_path):
    found = load(jsonl(tmp_path / "x.jsonl", [{"input_ids": [6, 7]}, {"input_ids": [8, 9, 10]}]))
    assert found.sha256() == hashlib.sha256(struct.pack("<7q", 2, 6, 7, 3, 8, 9, 10)).hexdigest()


# ---- errors


@pytest.mark.parametrize(
    "name", ["none.txt", "./none", "sub/none", "data.text", "~/none", "/none/none", "none.csv:text"]
)
def test_a_missing_local_path_never_goes_to_the_hub(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    refuse(name, name.split(":")[0], "no such file or directory")


@pytest.mark.parametrize("name", ["", "  ", "a:b:c:d:e", "x" * 5000, "\0"])
def test_a_name_that_is_none_is_refused(name):
    with pytest.raises(DataError) as caught:
        check_source(name, True)
        load(name)
    says(str(caught.value))


@pytest.mark.parametrize("name", ["wikitext-2.0", "owner/set.v2", "owner/set:en"])
def test_a_hub_name_with_a_dot_is_not_taken_for_a_file(name):
    check_source(name, has_tokenizer=True)


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("x.txt", b"", ["empty", "0 rows"]),
        ("x.txt", b"\n \n", ["empty", "2 rows, all blank"]),
        ("x.jsonl", b"", ["empty"]),
        ("x.json", b"[]", ["empty"]),
        ("x.csv", b"text\n", ["empty"]),
        ("x.txt", b"a\nb\xff", ["x.txt, line 2", "0xff is not UTF-8", "convert"]),
        ("x.csv", b"text\na\nb\xff", ["x.csv, line 3", "UTF-8"]),
        ("x.jsonl", b'{"text": "a"}\n\n{"text": ', ["x.jsonl, line 3", "not JSON"]),
        ("x.json", b'[{"text": "a"},\n{"text": "b"', ["x.json, line 2", "not JSON"]),
        ("x.jsonl", b'{"text": "a"}\n17', ["line 2", "type int", "object or a string"]),
        ("x.json", b'["a", [1]]', ["row 2", "type list"]),
        ("x.jsonl", b'{"text": 5}', ["line 1", "text is of type int"]),
        ("x.jsonl", b'{"text": ["a"]}', ["line 1", "text is of type list"]),
        ("x.jsonl", b'{"input_ids": "1 2"}', ["line 1", "input_ids is of type str"]),
        ("x.csv", b"title,body\na,b\n", ["line 2", "no text column", "title, body", ":COLUMN"]),
        ("x.csv", b"text\na,b\n", ["line 2", "more fields"]),
        ("x.csv", b"text\n" + b"a" * 200_000, ["x.csv", "not CSV", "field limit"]),
        ("x.jsonl", b"[" * 200_000, ["line 1", "not JSON", "recursion"]),
        ("x.json", b"[" * 200_000, ["x.json", "not JSON", "recursion"]),
        ("x.jsonl", b'{"input_ids": [' + b"9" * 10_000 + b"]}", ["line 1"]),
        ("x.jsonl", b'{"text": "\\ud800"}', ["line 1", "UnicodeEncodeError", "repair"]),
        ("x.parquet", b"PAR1 not", ["x.parquet", "ArrowInvalid", "again"]),
        ("x.tsv", b"a\tb", ["unknown kind", ".tsv", ".txt, .jsonl, .json, .csv, .parquet"]),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bad_content_is_one_line_that_names_the_place(tmp_path, name, content, parts):
    refuse(write(tmp_path / name, content), *parts)


def test_a_named_column_that_is_missing_lists_those_found(tmp_path):
    path = write(tmp_path / "x.csv", "title,body\na,b\n")
    refuse(f"{path}:text", "line 2", "no column 'text'", "title, body")


def test_a_missing_parquet_column_lists_those_found(tmp_path):
    pyarrow.parquet.write_table(pa.table({"n": [1], "m": [2]}), tmp_path / "x.parquet")
    refuse(f"{tmp_path / 'x.parquet'}:text", "row 1", "no column 'text'", "n, m")


def test_a_directory_without_known_files_is_refused(tmp_path):
    write(tmp_path / "x.md", "a")
    refuse(tmp_path, "no file of a known kind", ".jsonl")


def test_a_dangling_link_is_named(tmp_path):
    (tmp_path / "x.txt").symlink_to(tmp_path / "gone.txt")
    refuse(tmp_path, "x.txt", "cannot be read", "No such file")


def test_a_broken_saved_dataset_is_one_line(tmp_path):
    datasets.Dataset.from_dict({"text": ["a b"]}).save_to_disk(tmp_path / "d")
    write(tmp_path / "d/state.json", "{")
    refuse(tmp_path / "d", "save the dataset again")


def test_splits_without_train_ask_for_one(tmp_path):
    write(tmp_path / "dataset_dict.json", '{"splits": ["dev", "test"]}')
    refuse(tmp_path, "dev, test", "name one", f"{tmp_path}/dev")


@pytest.mark.parametrize("more", [{"samples": 0}, {"seq_len": 1}])
def test_a_request_for_nothing_is_refused(tmp_path, more):
    with pytest.raises(ConfigError, match="at least 1 sample of at least 2 tokens"):
        load(write(tmp_path / "x.txt", "a b"), **more)


# ---- the preflight


@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet", "saved"])
def test_the_preflight_asks_for_a_tokenizer_only_where_there_is_text(tmp_path, kind):
    def make(name, column, values):
        path = tmp_path / f"{name}.{kind}"
        rows = datasets.Dataset.from_dict({"n": [1] * len(values), column: values})
        if kind == "saved":
            rows.save_to_disk(path)
        elif kind == "parquet":
            pyarrow.parquet.write_table(pa.table(rows.to_dict()), path)
        elif kind == "jsonl":
            jsonl(path, rows.to_list())
        else:
            write(path, "\n".join(map(str, values)))
        return str(path)

    text = make("text", "text", ["", "a b"])
    check_source(text, has_tokenizer=True)
    with pytest.raises(DataError, match="no tokenizer files"):
        check_source(text, has_tokenizer=False)
    if kind != "txt":
        check_source(make("ids", "input_ids", [[6, 7]]), has_tokenizer=False)


def test_the_preflight_sees_an_empty_source(tmp_path):
    with pytest.raises(DataError, match="empty"):
        check_source(str(write(tmp_path / "x.txt", "\n")), True)


def test_the_preflight_names_the_columns_of_a_saved_dataset(tmp_path):
    datasets.Dataset.from_dict({"q": ["a"], "r": ["b"]}).save_to_disk(tmp_path / "d")
    with pytest.raises(DataError, match="no text column, found q, r"):
        check_source(str(tmp_path / "d"), True)


def test_the_preflight_reads_no_further_than_the_first_row(tmp_path):
    path = write(tmp_path / "x.jsonl", b'{"text": "a"}\n' + b'{"text": "b c d e f g h"}\n' * 1_000_000)
    start = time.perf_counter()
    check_source(str(path), True)
    assert time.perf_counter() - start < 0.2


# ---- the model's tokenizer


def test_a_directory_without_tokenizer_files_has_no_tokenizer(tmp_path):
    write(tmp_path / "config.json", "{}")
    assert load_tokenizer(tmp_path) is None


def test_a_saved_tokenizer_is_loaded(tmp_path):
    make_tokenizer(eos=True).save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path)("a b")["input_ids"] == ids("ab")


def test_a_broken_tokenizer_is_one_line(tmp_path):
    make_tokenizer().save_pretrained(tmp_path)
    write(tmp_path / "tokenizer.json", "{")
    with pytest.raises(DataError) as caught:
        load_tokenizer(tmp_path)
    says(str(caught.value), str(tmp_path), "tokenizer", "copy")


def test_a_tokenizer_without_its_vocabulary_is_refused(tmp_path):
    write(tmp_path / "tokenizer_config.json", '{"tokenizer_class": "Qwen2Tokenizer"}')
    with pytest.raises(DataError, match="no vocabulary"):
        load_tokenizer(tmp_path)


# ---- anything at all

ROWS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["text", "messages", "input_ids", "attention_mask", "role", "x"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)
BYTES = st.binary(max_size=60) | st.lists(ROWS, max_size=4).flatmap(
    lambda rows: st.sampled_from([json.dumps(rows).encode(), b"\n".join(json.dumps(row).encode() for row in rows)])
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=BYTES, suffix=st.sampled_from([".jsonl", ".json", ".csv", ".txt", ".parquet"]))
def test_any_bytes_load_or_raise_an_error_of_ours(tmp_path, content, suffix):
    path = write(tmp_path / f"x{suffix}", content)
    for work in (lambda: check_source(str(path), True), lambda: load(path, make_tokenizer(chat=CHAT))):
        try:
            work()
        except SvdqError as error:
            says(str(error))
