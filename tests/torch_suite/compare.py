"""Run PyTorch's own tests of scaled_dot_product_attention on scaledot.attention.

    python tests/torch_suite/compare.py pytorch/test [test_transformers.py ...]

The folder holds torch's tests of the installed release; they are not part of this repository. Each
file runs with our function in torch's place, and what failed runs again without. A test that fails
with ours alone must belong to a line of docs/differences.md.
"""

import argparse
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import NamedTuple
from xml.etree import ElementTree

HERE = pathlib.Path(__file__).parent

# The files, and which of their tests call the function ("": all).
FILES = {
    "test_transformers.py": "",
    "nn/test_multihead_attention.py": "",
    "test_ops.py": "scaled_dot_product_attention",
    "test_ops_gradients.py": "scaled_dot_product_attention",
    "test_proxy_tensor.py": "scaled_dot_product_attention",
    "test_nestedtensor.py": "sdpa or attention or mha or transformer",
}

# What docs/differences.md explains: a pattern of the tests' names, the beginning of the line.
EXPLAINED = {
    r"test_scaled_dot_product_attention_.*_causal_attn_mask_": "`attn_mask` together with",
    r"test_scaled_dot_product_attention_.*_dropout_p_0_[25]_": "dropout",
    r"test_transformerencoderlayer_subclass": "dropout",
    r"test_scaled_dot_product_attention_input_dim_[34]_": "nested tensors with `is_causal`",
    r"test_cow_input_nn_functional_scaled_dot_product": "a lazily cloned",
    r"test_operator_nn_functional_scaled_dot_product": "the last digits",
}


class Outcome(NamedTuple):
    passed: int
    failed: dict[str, str]  # node of pytest -> first line of what went wrong


def main() -> int:
    """Compare the files and return the exit status: 1 where a failure is not explained."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path, help="the folder test of torch's sources")
    parser.add_argument("files", nargs="*", help=f"some of {', '.join(FILES)}")
    given = parser.parse_args()
    unknown = set(given.files) - set(FILES)
    if unknown or not given.folder.is_dir():
        parser.error(f"{', '.join(unknown) or given.folder} is not there")
    unexplained = 0
    for file in given.files or FILES:
        unexplained += compare(given.folder, file)
    print(f"{unexplained} failures that docs/differences.md does not explain")
    return 1 if unexplained else 0


def compare(folder: pathlib.Path, file: str) -> int:
    """Print what fails in a file with our function alone; return how many no line explains."""
    ours = run(folder, [file], FILES[file], ours=True)
    theirs = run(folder, sorted(ours.failed), "", ours=False) if ours.failed else Outcome(0, {})
    failed = {node: why for node, why in ours.failed.items() if node not in theirs.failed}
    print(
        f"{file}: {ours.passed} passed, {len(failed)} failed with scaledot alone, "
        f"{len(theirs.failed)} with and without"
    )
    unexplained = 0
    for node, why in failed.items():
        line = next((line for name, line in EXPLAINED.items() if re.search(name, node)), None)
        unexplained += line is None
        print(f"  {node.split('::', 1)[-1]}: {line or f'NOT EXPLAINED: {why}'}", flush=True)
    return unexplained


def run(folder: pathlib.Path, nodes: list[str], selected: str, ours: bool) -> Outcome:
    """Run tests in a process of their own."""
    with tempfile.TemporaryDirectory() as place:
        report = pathlib.Path(place) / "report.xml"
        chosen = pathlib.Path(place) / "nodes"
        chosen.write_text("\n".join(nodes))
        command = [sys.executable, "-m", "pytest", "-q", "--tb=line", f"--junitxml={report}"]
        command += ["-p", "no:randomly", "-p", "no:cacheprovider", f"@{chosen}"]
        command += ["-k", selected] if selected else []
        command += ["-p", "in_torchs_place"] if ours else []
        path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path}
        ended = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        if ended.returncode not in (0, 1):  # 1: some tests failed
            raise SystemExit(
                f"{nodes[0]} did not run:\n{ended.stdout[-3000:]}{ended.stderr[-3000:]}"
            )
        return read(report, nodes)


def read(report: pathlib.Path, nodes: list[str]) -> Outcome:
    """Read pytest's report; its names of classes are turned into nodes that it takes again."""
    passed, failed = 0, {}
    file = nodes[0].split("::")[0]
    for case in ElementTree.parse(report).iter("testcase"):
        wrong = case.find("failure")
        wrong = case.find("error") if wrong is None else wrong
        if wrong is not None:
            kind = case.get("classname", "").rsplit(".", 1)[-1]
            words = (wrong.get("message") or wrong.text or "").strip().splitlines()
            failed[f"{file}::{kind}::{case.get('name')}"] = words[0][:200] if words else ""
        elif case.find("skipped") is None:
            passed += 1
    return Outcome(passed, failed)


if __name__ == "__main__":
    sys.exit(main())
