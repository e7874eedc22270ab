"""lm-eval's tasks on both models. With lm-eval itself where it is installed, else with a stand-in of its four names."""

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from svdq import tasks
from svdq.linear import W4A4Linear
from svdq.tasks import Score, scores

RESULT = {
    "words": {"alias": "words", "acc,none": 0.5, "acc_stderr,none": 0.1, "exact_match,strict": 1, "sample_len": 6}
}


@pytest.fixture
def lm_eval(monkeypatch):
    """A stand-in whose one metric is the share of linears that are quantized; it keeps what it was called with."""
    called = []

    class TaskManager:
        def __init__(self, include_path=None):
            self.include_path = include_path

        def load(self, names):
            if unknown := [name for name in names if name != "words"]:
                raise KeyError(f"{unknown[0]} is no task")

    def simple_evaluate(language_model, **options):
        called.append(options)
        linears = [m for m in language_model["pretrained"].modules() if isinstance(m, (torch.nn.Linear, W4A4Linear))]
        share = sum(isinstance(linear, W4A4Linear) for linear in linears) / len(linears)
        return {"results": {"words": {"alias": "words", "share,none": share, "share_stderr,none": "N/A"}}}

    module = ModuleType("lm_eval")
    module.simple_evaluate, module.tasks = simple_evaluate, SimpleNamespace(TaskManager=TaskManager)
    module.models = SimpleNamespace(huggingface=SimpleNamespace(HFLM=dict))
    for name, value in (
        ("lm_eval", module),
        ("lm_eval.tasks", module.tasks),
        ("lm_eval.models", module.models),
        ("lm_eval.models.huggingface", module.models.huggingface),
    ):
        monkeypatch.setitem(sys.modules, name, value)
    return called


def written(path, content):
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.json", "[", ["neither JSON nor YAML"]),
        ("a.yaml", "- a\n b: [", ["neither JSON nor YAML"]),
        ("a.json", [], ["list of task names"]),
        ("a.json", [1], ["list of task names"]),
        ("a.yaml", "words", ["list of task names"]),
        ("a.json", {"limit": 3}, ["list of task names", "'tasks'"]),
        ("a.json", {"tasks": ["words"], "limits": 3}, ["unknown option 'limits'", "limit"]),
        ("a.json", ["swords"], ["lm-eval", "swords is no task"]),
    ],
)
def test_a_file_that_names_no_tasks_is_refused(refused, quantized, lm_eval, tmp_path, name, content, words):
    directory, file = quantized("llama")
    path = written(tmp_path / name, content)
    message = refused("verify", file, "--model", directory, "--tasks", path)
    assert all(word in message for word in [f"--tasks {path}", *words]), message


def test_a_missing_file_is_refused(refused, quantized, tmp_path):
    directory, file = quantized("llama")
    message = refused("verify", file, "--model", directory, "--tasks", tmp_path / "none.json")
    assert "none.json: cannot be read: No such file" in message


def test_without_lm_eval_one_line_says_how_to_install_it(refused, quantized, tmp_path, monkeypatch):
    directory, file = quantized("llama")
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    message = refused("verify", file, "--model", directory, "--tasks", written(tmp_path / "a.json", ["words"]))
    assert "lm-eval is not installed" in message and "pip install 'svdq[tasks]'" in message


def test_a_model_that_writes_no_text_is_refused(refused, quantized, lm_eval, tmp_path):
    directory, file = quantized("bert")
    message = refused("verify", file, "--model", directory, "--tasks", written(tmp_path / "a.json", ["words"]))
    assert "BertModel is no causal language model" in message


def test_both_models_are_evaluated_with_the_options_of_the_file(
    svdq, quantized, toy_copy, add_tokenizer, lm_eval, tmp_path
):
    _, file = quantized("llama")
    directory = toy_copy("llama")
    add_tokenizer(directory)
    path = written(tmp_path / "a.yaml", "tasks: [words]\nlimit: 3\nbatch_size: 2\ninclude_path: here\n")
    result = svdq("verify", file, "--model", directory, "--tasks", path, "--json", tmp_path / "report.json")
    assert result.code == 0
    assert "words   share    0.0000     0.9333            -" in result.out  # 14 of 15 linears: not the head
    found = json.loads((tmp_path / "report.json").read_text())["tasks"]
    assert found == [{"task": "words", "metric": "share", "original": 0.0, "quantized": 14 / 15, "stderr": None}]
    assert [(call["tasks"], call["limit"], call["task_manager"].include_path) for call in lm_eval] == [
        (["words"], 3, "here")
    ] * 2
    assert "batch_size" not in lm_eval[0]


def test_a_score_for_every_metric_that_is_a_number():
    original = {"words": {**RESULT["words"], "acc,none": 0.25}}
    assert scores(original, RESULT) == [
        Score("words", "acc", 0.25, 0.5, 0.1),
        Score("words", "exact_match (strict)", 1, 1, None),
    ]


def test_lm_eval_itself_takes_a_task_from_a_folder(svdq, quantized, toy_copy, add_tokenizer, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval.models.huggingface")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    _, file = quantized("llama")
    directory = toy_copy("llama")
    add_tokenizer(directory, eos=True)
    rows = [{"context": f"w{i}", "choices": [f" w{7 * i}", f" w{11 * i}"], "label": i % 2} for i in range(6)]
    written(tmp_path / "words.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "words",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "words.jsonl")}},
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "{{context}}",
        "doc_to_target": "{{label}}",
        "doc_to_choice": "{{choices}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    path = written(tmp_path / "tasks.json", {"tasks": [task], "limit": 4, "bootstrap_iters": 0})
    result = svdq("verify", file, "--model", directory, "--tasks", path, "--json", tmp_path / "report.json")
    assert result.code == 0
    (score,) = json.loads((tmp_path / "report.json").read_text())["tasks"]
    assert (score["task"], score["metric"]) == ("words", "acc")
    assert {score["original"], score["quantized"]} <= {0.0, 0.25, 0.5, 0.75, 1.0}


def test_the_options_are_those_of_lm_eval():
    lm_eval = pytest.importorskip("lm_eval.evaluator")
    import inspect

    known = inspect.signature(lm_eval.simple_evaluate).parameters
    assert set(tasks.OPTIONS) - {"include_path"} <= set(known)
