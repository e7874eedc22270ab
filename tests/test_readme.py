"""README says what the code says: the checkpoint's tables, the file tree, the test command that CI runs."""

import re
from pathlib import Path

import pytest

from svdq import schema
from svdq.kernels import support

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("rules", [schema.CANONICAL, schema.PACKED], ids=["canonical", "packed"])
def test_the_tensor_tables_are_those_of_the_schema(rules):
    assert schema.markdown_table(rules) in README


def test_the_table_of_formats_and_gpus_is_that_of_the_code():
    assert support.markdown_table() in README


def test_every_source_file_has_a_line_in_the_tree():
    tree = README.split("## The files")[1]
    for folder in ("svdq", "calibration", "kernels"):
        for file in (ROOT / folder).glob("*.py"):
            if file.name != "__init__.py":
                assert re.search(rf"^  {re.escape(file.name)} ", tree, re.MULTILINE), file


def test_ci_runs_the_test_command_that_readme_gives():
    command = re.search(r"^(make test)\b", README, re.MULTILINE)
    assert command
    assert (ROOT / ".ci/run").read_text().rstrip().endswith(command[1])


def test_every_command_is_shown():
    for command in ("calibrate", "quantize", "verify", "export-packed", "inspect", "kernels"):
        assert re.search(rf"^\$ svdq {command}\b", README, re.MULTILINE), command
