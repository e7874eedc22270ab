"""Benchmark tasks of lm-eval, if it is installed, on the original model and on the quantized one, one after the other.

A file names the tasks: a JSON or YAML list of what lm-eval's `simple_evaluate` takes as tasks (names, or whole task
configurations), or an object with that list as `tasks` and lm-eval's own options beside it.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from svdq.errors import ConfigError
from svdq.models import Model, compute_dtype
from svdq.quantized import QuantizedFile

INSTALL = "pip install 'svdq[tasks]'"
OPTIONS = (  # of simple_evaluate, but for the first two, which are the model's and the task manager's
    "batch_size", "include_path", "num_fewshot", "limit", "bootstrap_iters", "system_instruction",
    "apply_chat_template", "fewshot_as_multiturn", "gen_kwargs", "random_seed", "numpy_random_seed",
    "torch_random_seed", "fewshot_random_seed",
)  # fmt: skip


@dataclass(frozen=True)
class Tasks:
    """What to evaluate, and with which options; lm-eval knows and has loaded every task."""

    names: list[str | dict[str, Any]]
    options: dict[str, Any]
    manager: Any  # lm_eval.tasks.TaskManager


@dataclass(frozen=True)
class Score:
    """One metric of one task; stderr is lm-eval's of the quantized model's value, None where it gives none."""

    task: str
    metric: str
    original: float
    quantized: float
    stderr: float | None


def prepare_tasks(path: str | Path, model: Model) -> Tasks:
    """Everything that can fail before a model is loaded.

    Raises ConfigError for a file that is not as the module says, if lm-eval is not installed, or does not know a task
    or cannot load it, or if the model writes no text.
    """
    where = f"--tasks {path}"
    found = _parse(Path(path), where)
    options = dict(found) if isinstance(found, dict) else {}
    names = options.pop("tasks", None) if isinstance(found, dict) else found
    if not isinstance(names, list) or not names or not all(isinstance(one, (str, dict)) for one in names):
        raise ConfigError(f"{where}: wanted a list of task names, or an object with that list as 'tasks'")
    if unknown := [str(key) for key in options if key not in OPTIONS]:
        raise ConfigError(f"{where}: unknown option {unknown[0]!r}; wanted tasks, {', '.join(OPTIONS)}")
    if not model.is_causal_lm:
        raise ConfigError(f"{where}: {type(model.tree).__name__} is no causal language model; lm-eval wants one")
    lm_eval = _lm_eval()
    try:
        manager = lm_eval.tasks.TaskManager(include_path=options.get("include_path"))
        manager.load(list(names))
    except Exception as error:  # lm-eval raises whatever a wrong name or file happens to break
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{where}: lm-eval: {reason[:300]}") from error
    return Tasks(names, options, manager)


def _parse(path: Path, where: str) -> Any:
    import yaml  # huggingface_hub brings it

    try:
        text = path.read_text()
        return json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{where}: neither JSON nor YAML: {' '.join(str(error).split())}") from None


def _lm_eval() -> Any:
    try:
        import lm_eval
        import lm_eval.models.huggingface
        import lm_eval.tasks
    except ImportError as error:
        missing = error.name or str(error)
        raise ConfigError(
            f"--tasks: lm-eval is not installed, or not wholly (no module {missing}); {INSTALL}"
        ) from None
    return lm_eval


def run_tasks(
    model: Model,
    quantized: QuantizedFile,
    tasks: Tasks,
    *,
    device: torch.device,
    kernels: str = "reference",
    trust_remote_code: bool = False,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> list[Score]:
    """Every metric of every task. Each model in turn is wholly in memory, in the type that `verify` computes in.

    kernels  'reference' or 'cuda', as in `verify`
    """
    from transformers import AutoModelForCausalLM

    from svdq.linear import load_quantized

    dtype = compute_dtype(model, device)

    def original() -> torch.nn.Module:
        loaded: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
            model.directory, dtype=dtype, local_files_only=True, trust_remote_code=trust_remote_code
        )
        return loaded.to(device)

    def ours() -> torch.nn.Module:
        return load_quantized(
            model.directory, quantized.file.path, device=device, dtype=dtype,
            kernels="auto" if kernels == "cuda" else kernels, activations=quantized.activations,
            trust_remote_code=trust_remote_code,
        )  # fmt: skip

    results = []
    for done, load in enumerate((original, ours)):
        progress("tasks", done, 2)
        results.append(_evaluate(load(), model, tasks, trust_remote_code))
        gc.collect()  # the model, before the next is loaded
    progress("tasks", 2, 2)
    return scores(*results)


def _evaluate(loaded: torch.nn.Module, model: Model, tasks: Tasks, trust_remote_code: bool) -> dict[str, dict]:
    """lm-eval's results, by task."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        model.directory, local_files_only=True, trust_remote_code=trust_remote_code
    )
    lm_eval, batch = _lm_eval(), tasks.options.get("batch_size", 1)
    options = {key: value for key, value in tasks.options.items() if key not in ("batch_size", "include_path")}
    language_model = lm_eval.models.huggingface.HFLM(pretrained=loaded, tokenizer=tokenizer, batch_size=batch)
    return lm_eval.simple_evaluate(
        language_model, tasks=list(tasks.names), task_manager=tasks.manager, log_samples=False, **options
    )["results"]


def scores(original: dict[str, dict[str, Any]], quantized: dict[str, dict[str, Any]]) -> list[Score]:
    """lm-eval's results of both models → one score a task and metric."""
    found = []
    for task, metrics in quantized.items():
        for key, value in metrics.items():
            metric, comma, chosen = key.partition(",")  # 'acc,none': the metric and the filter of the answers
            ours, theirs = _number(value), _number(original[task].get(key))
            if not comma or metric.endswith("_stderr") or ours is None or theirs is None:
                continue
            error = _number(metrics.get(f"{metric}_stderr,{chosen}"))
            name = metric if chosen == "none" else f"{metric} ({chosen})"
            found.append(Score(task, name, theirs, ours, error))
    return found


def _number(value: Any) -> float | None:
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def scores_text(found: list[Score]) -> str:
    """As a table."""
    from svdq.report import table

    rows = []
    for one in found:
        error = "-" if one.stderr is None else f"{one.stderr:.4f}"
        rows.append([one.task, one.metric, f"{one.original:.4f}", f"{one.quantized:.4f}", error])
    return table(["task", "metric", "original", "quantized", "± (lm-eval)"], rows)
