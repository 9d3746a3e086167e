"""`scaledot run`: the script behaves as under Python alone, and its attention is read."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from watch.store_cases import unprivileged

from scaledot import cli
from scaledot.measure import Vitals
from scaledot.watch import inside, run
from scaledot.watch.coverage import Coverage
from scaledot.watch.reading import Phase, Reading
from scaledot.watch.store import RunReader
from scaledot.watch.store.ownership import name_of_its_own

SOURCE = Path(run.__file__).parents[2]

# The model lives in a function: it is gone before the process ends, and its coverage must not be.
TRAIN = """
import os, sys
os.environ["OMP_NUM_THREADS"] = "1"
print(__name__, sys.argv, sys.path, __file__, "torch" in sys.modules, "scaledot" in sys.modules)
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

print(torch.get_num_threads())


class Attention(nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.heads, self.qkv = heads, nn.Linear(30, 90)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
                   for t in self.qkv(x).chunk(3, -1))
        return x + scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def main():
    torch.manual_seed(0)
    model = nn.Sequential(Attention(3), Attention(5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(7):
        x = torch.randn(2, 11, 30)
        loss = (model(x) - x.roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(repr(loss.item()))


main()
"""


def _launch(*arguments: str) -> run.Launch:
    parser = cli.Parser("scaledot run")
    run.add_arguments(parser)
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    environment.pop("RANK", None)
    return run.launch_of(parser.parse_args(arguments), environment)


def _finish(command, environment, **options) -> SimpleNamespace:
    """Run to the end in the current folder; the process is the one that the options call main."""
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    out, err = process.communicate(**options, timeout=600)
    return SimpleNamespace(status=process.returncode, out=out, err=err)


def _watched(*arguments: str, **options) -> SimpleNamespace:
    """As the command does, which becomes the script: the process id does not change."""
    launch = _launch(*arguments)
    become = (
        "import json, os, sys;"
        "told = json.loads(os.environ['SCALEDOT_RUN']);"
        "told['main'] = os.getpid();"
        "os.environ['SCALEDOT_RUN'] = json.dumps(told);"
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    command = [sys.executable, "-I", "-S", "-c", become, *launch.command]
    return _finish(command, launch.environment, **options)


def _plain(*arguments: str, **options) -> SimpleNamespace:
    command = [sys.executable, *arguments]
    return _finish(command, {**os.environ, "PYTHONPATH": str(SOURCE)}, **options)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _write(name: str, text: str) -> None:
    Path(name).write_text(text, "utf-8")


STATE = """
import gc, logging, multiprocessing, os, random, signal, sys, threading, warnings
before = list(sys.path), [repr(one) for one in sys.meta_path], sys.excepthook, sys.argv, sys.flags
import torch
from torch import nn
from torch.nn import functional as F

def state():
    os.umask(mask := os.umask(0))
    handlers = {int(number): signal.getsignal(number) for number in signal.valid_signals()}
    ours = ("PYTHONPATH", "SCALEDOT_RUN", "SCALEDOT_RUN_WATCHED", "_")
    yield "hooks", sys.excepthook, sys.unraisablehook, sys.displayhook, threading.excepthook
    yield "imports", sys.meta_path, sys.path_hooks, sys.path, __import__
    yield "program", sys.argv, sys.flags, os.getcwd(), mask, sorted(globals())
    yield "environment", {name: os.environ[name] for name in os.environ if name not in ours}
    yield "signals", handlers
    yield "warnings", [str(one) for one in warnings.filters], warnings.showwarning
    yield "gc", gc.isenabled(), gc.get_threshold(), gc.get_debug(), gc.callbacks
    yield "more gc", gc.get_freeze_count()
    yield "logging", logging.root.level, logging.root.handlers, logging.getLoggerClass()
    yield "limits", sys.getrecursionlimit(), sys.getswitchinterval(), sys.gettrace()
    yield "streams", type(sys.stdout), sys.stdout.encoding, sys.stdout.errors, sys.stderr.errors
    yield "processes", multiprocessing.get_start_method(allow_none=True)
    yield "random", random.getstate(), torch.get_rng_state().tolist()
    yield "types", torch.get_default_dtype(), torch.get_default_device()
    yield "gradients", torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    yield "more gradients", torch.is_anomaly_enabled(), torch.is_autocast_enabled("cpu")
    yield "threads", torch.get_num_threads(), torch.get_num_interop_threads()
    yield "kernels", torch.are_deterministic_algorithms_enabled(), torch.backends.mkldnn.enabled
    yield "modes", torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()
    yield "names", sorted(vars(F)), sorted(vars(torch.nn)), sorted(vars(nn.Module))
    yield "modules", [one for one in sys.modules if one.startswith(("torch.", "multiprocessing"))]

print(before)
for one in state():
    if one[0] not in ("random", "environment"):
        print(*one)
torch.manual_seed(0)
random.seed(0)
model = nn.TransformerEncoderLayer(8, 2, 16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.randn(5, 2, 8)).square().mean().backward()
    optimizer.step()
for one in state():
    print(*one)
"""


@pytest.mark.slow
def test_what_a_script_can_ask_of_its_process_is_as_under_python():
    _write("train.py", STATE)
    plain, watched = _plain("train.py"), _watched("--every", "1", "train.py")
    assert plain.status == watched.status == 0, plain.err
    lines, expected = (re.sub("0x[0-9a-f]+", "", one.out).splitlines() for one in (watched, plain))
    for line, other in zip(lines, expected, strict=True):
        assert line == other


LOGGING = """
import logging, sys, torch, torch.nn.attention
logging.basicConfig(stream=sys.stdout, level=logging.DEBUG)
attend = torch.nn.functional.scaled_dot_product_attention
with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
    for step in range(3):
        torch.func.vmap(lambda q: attend(q, q, q))(torch.ones(2, 1, 2, 3, 4))
logging.getLogger("train").info("done")
"""


@pytest.mark.nightly
@pytest.mark.slow
def test_what_the_watch_logs_is_no_word_of_the_script():
    _write("train.py", LOGGING)
    plain, watched = _plain("train.py"), _watched("--every", "1", "train.py")
    assert (watched.status, watched.out) == (plain.status, plain.out)
    assert plain.out == "INFO:train:done\n"
    first, *_ = watched.err.splitlines()
    assert first == (
        "scaledot: the watch cannot measure <lambda>, which calls scaled_dot_product_attention: "
        "it runs inside a transform of torch.func"
    )
    assert all(line.startswith("scaledot: ") for line in watched.err.splitlines())


IMPORTS = """
import os, sys, torch
first = set(sys.modules)
os.environ["TORCHDYNAMO_VERBOSE"] = "1"  # read when the compiler is imported
import torch._dynamo.config
print(torch._dynamo.config.verbose)
ours = {"scaledot", "sitecustomize", *sys.stdlib_module_names}
print(sorted({name.partition(".")[0] for name in first} - ours))
print(sorted(name for name in first if name.startswith("torch.")))
"""


@pytest.mark.nightly
@pytest.mark.slow
def test_what_the_script_has_not_imported_is_not_there():
    """Libraries read the environment when they are imported; torch's compiler takes a second."""
    _write("train.py", IMPORTS)
    plain, watched = _plain("train.py"), _watched("train.py")
    assert watched.out == plain.out
    assert plain.out.startswith("True\n")


@pytest.mark.slow
def test_losses_arguments_and_paths_are_those_of_python_and_readings_are_kept():
    _write("train.py", TRAIN)
    plain = _plain("train.py", "--every", "-m", "--", "x")
    watched = _watched(
        "--every", "3", "--store", "run.vitals", "train.py", "--every", "-m", "--", "x"
    )
    assert plain.status == 0, plain.err
    assert watched.out == plain.out
    assert (watched.status, plain.err) == (0, "")
    first, last = watched.err.splitlines()
    assert first == "scaledot: vitals go to run.vitals; live view: scaledot top run.vitals"
    assert last.startswith(
        "scaledot: 2 of 2 attention layers watched; too little seen: 3 of 7 steps were read, at "
        "most 3 apart; --every 1 reads more; own cost "
    )
    reader = RunReader("run.vitals")
    assert [step.step for step in reader.steps("train")] == [0, 3, 6]
    assert reader.layers() == {"0": 3, "1": 5}
    assert reader.attributes.more["coverage"] == "2 of 2 attention layers watched"
    assert reader.attributes.command == ("train.py", "--every", "-m", "--", "x")
    assert reader.attributes.model == "Sequential, 5.6K parameters, float32, 2 attention layers"
    assert {"loss", "learning_rate"} <= set(reader.scalar_names())
    printed = [float(line) for line in watched.out.splitlines()[2:]]
    assert reader.scalars("loss").steps.tolist() == [0, 3, 6]
    assert reader.scalars("loss").values.tolist() == pytest.approx(printed[::3])
    assert reader.scalars("learning_rate").values.tolist() == pytest.approx([1e-2] * 3)
    assert reader.segments()[-1].ended is not None


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("remedy", ["softcap:5", "log-n", "qk-norm"])
@pytest.mark.parametrize("flags", [[], ["--dry-run"]])
def test_what_is_said_before_the_first_reading_is_not_lost(remedy, flags):
    _write("train.py", TRAIN)
    watched = _watched("--remedy", remedy, *flags, "--store", "run.vitals", "train.py")
    assert watched.status == 0, watched.err
    first, *others, _ = watched.err.splitlines()
    assert first.startswith("scaledot: vitals go to run.vitals")
    assert any(remedy.partition(":")[0] in line for line in others), watched.err


# nanoGPT's way: dropout, accumulation, recomputation, a compiled forward pass; attention by hand
# in the last layer. The losses are printed to the bit.
NANO = """
import sys, warnings
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

warnings.simplefilter("ignore")


class Block(nn.Module):
    def __init__(self, by_hand):
        super().__init__()
        self.by_hand, self.mix, self.out = by_hand, nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (3, -1)).transpose(1, 2) for t in self.mix(x).chunk(3, -1))
        if self.by_hand:
            scores = (q @ k.mT / 2).masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf)
            y = F.dropout(F.softmax(scores, -1), 0.1, self.training) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
        return x + F.dropout(self.out(y.transpose(1, 2).flatten(2)), 0.1, self.training)


class Nano(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(29, 12), nn.Linear(12, 29)
        self.blocks = nn.ModuleList(Block(by_hand) for by_hand in BY_HAND)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.roll(-1, 1).flatten())


def main():
    torch.manual_seed(0)
    nano = Nano()
    model = torch.compile(nano, backend="aot_eager", fullgraph=True) if COMPILED else nano
    optimizer = torch.optim.AdamW(nano.parameters(), lr=1e-2)
    for _ in range(4):
        for _ in range(2):
            loss = model(torch.randint(29, (2, 7)))
            (loss / 2).backward()
            print(loss.item().hex())
        optimizer.step()
        optimizer.zero_grad()


main()
"""


@pytest.mark.nightly
def test_a_compiled_script_like_nanogpt_prints_the_same_to_the_bit():
    text = NANO.replace("BY_HAND", "(False, False, True)").replace("COMPILED", "True")
    _write("train.py", text)
    plain, watched = _plain("train.py"), _watched("--store", "run.vitals", "train.py")
    assert (plain.status, plain.err) == (0, "")
    assert plain.out.count("0x") == 8
    assert watched.out == plain.out
    words = "2 of 3 attention layers watched; 1 layer uses unhooked matmuls: blocks.2"
    assert f"scaledot: {words}; " in watched.err
    reader = RunReader("run.vitals")
    assert reader.attributes.more["coverage"] == words
    assert reader.layers() == {"blocks.0": 3, "blocks.1": 3}
    assert reader.attributes.model.startswith("Nano, ")


@pytest.mark.nightly
def test_a_script_of_nothing_but_plain_products_is_told_so():
    _write("train.py", NANO.replace("BY_HAND", "(True, True)").replace("COMPILED", "False"))
    plain, watched = _plain("train.py"), _watched("train.py")
    assert watched.out == plain.out
    account = "0 of 2 attention layers watched; 2 layers use unhooked matmuls: blocks.0, blocks.1"
    first, last = watched.err.splitlines()
    assert first == (
        f"scaledot: after 1 step: {account}; the losses are watched for NaN and infinity"
    )
    assert last.startswith(f"scaledot: {account}; the losses of ")
    assert last.endswith(" steps were watched alone")
    assert not list(Path().glob("*.vitals*"))


ALONE = """
import torch

torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(9):
    if step == 4:
        with torch.no_grad():
            model.weight[0, 0] = float("nan")
    loss = model(torch.ones(2, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("done")
"""


@pytest.mark.nightly
def test_the_loss_of_a_program_without_attention_is_watched():
    _write("train.py", ALONE)
    watched = _watched("--alarms", "alarms.jsonl", "train.py")
    assert (watched.status, watched.out) == (0, "done\n")
    first, alarm, last = watched.err.splitlines()
    assert first == (
        "scaledot: after 1 step: no attention found yet; the losses are watched for NaN and "
        "infinity"
    )
    assert alarm.startswith("scaledot: act, step 4: the loss is NaN.")
    assert last == (
        "scaledot: no attention found; the losses of 9 steps were watched alone; alarms: 1 act"
    )
    assert json.loads(Path("alarms.jsonl").read_text())["kind"] == "loss"
    assert not list(Path().glob("*.vitals*"))
    ended = _watched("--fail-on", "act", "train.py")
    assert (ended.status, ended.out) == (3, "")


TRANSFORMERS = """
import torch, transformers

sizes = dict(vocab_size=29, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
             num_attention_heads=4, max_position_embeddings=32)
torch.manual_seed(0)
for kind, implementation in (("Llama", "eager"), ("Bert", "sdpa")):
    config = getattr(transformers, kind + "Config")(**sizes, attn_implementation=implementation)
    name = "LlamaForCausalLM" if kind == "Llama" else "BertForMaskedLM"
    model = getattr(transformers, name)(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        tokens = torch.randint(29, (2, 7))
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(loss.item().hex())
"""


@pytest.mark.nightly
def test_a_script_of_transformers_prints_the_same_to_the_bit():
    pytest.importorskip("transformers")
    _write("train.py", TRANSFORMERS)
    plain = _plain("train.py")
    watched = _watched("--every", "1", "--store", "run.vitals", "train.py")
    assert plain.status == 0, plain.err
    assert plain.out.count("0x") == 6
    assert watched.out == plain.out
    assert "scaledot: 4 of 4 attention layers watched; " in watched.err


@pytest.mark.nightly
@pytest.mark.slow
def test_the_worker_of_a_launcher_is_watched_and_only_the_first_rank_speaks():
    _write("train.py", TRAIN)
    _write(
        "launch.py",
        "import os, subprocess, sys\n"
        "os.environ['RANK'] = '1'\n"
        "sys.exit(subprocess.call([sys.executable, 'train.py']))\n",
    )
    done = _watched("--store", "run.vitals", "launch.py")
    assert (done.status, done.err) == (0, "")
    assert [path.name for path in Path().glob("*.vitals")] == ["run.rank1.vitals"]
    assert RunReader("run.rank1.vitals").layers() == {"0": 3, "1": 5}


@pytest.mark.slow
def test_torch_without_attention_leaves_one_line_no_file_and_the_traceback_alone():
    text = "import torch\ndef fall():\n    raise ValueError('boom')\nfall()\n"
    _write("fail.py", text.replace("torch", "json"))  # the same traceback, and sooner
    plain = _plain("fail.py")
    _write("fail.py", text)
    watched = _watched("fail.py")
    assert "ValueError: boom" in plain.err
    assert watched.err == plain.err + "scaledot: no attention found\n"
    assert watched.status == plain.status == 1
    assert not list(Path().glob("*.vitals*"))


def test_a_script_without_torch_gets_one_line():
    _write("quiet.py", "print('hello')")
    done = _watched("quiet.py")
    assert (done.status, done.out) == (0, "hello\n")
    assert done.err == "scaledot: no attention found: torch was not imported\n"


@pytest.mark.parametrize(
    "text",
    [
        "import sys; sys.exit(7)",
        "import sys; sys.exit('a message')",
        "raise SystemExit",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
        "import os; os._exit(5)",
        "1 +",
    ],
)
def test_the_end_of_the_script_is_the_end_of_the_command(text):
    _write("script.py", text)
    plain, watched = _plain("script.py"), _watched("script.py")
    assert watched.status == plain.status
    assert watched.err.startswith(plain.err)


def test_ctrl_c_ends_it_as_it_ends_python():
    _write(
        "sleep.py",
        "import time\n"
        "try:\n    print('up', flush=True); time.sleep(60)\n"
        "finally:\n    print('down')\n",
    )
    launch = _launch("sleep.py")
    with subprocess.Popen(
        launch.command,
        env=launch.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A shell that starts these tests in the background has them ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        assert process.stdout
        assert process.stderr
        assert process.stdout.readline() == b"up\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == b"down\n"
        assert process.stderr.read().rstrip().endswith(b"KeyboardInterrupt")
        assert process.wait(timeout=60) == -signal.SIGINT


def test_a_module_is_run_as_python_does():
    Path("package").mkdir()
    _write("package/__init__.py", "")
    _write("package/module.py", "import sys; print(__name__, __spec__.name, sys.argv, sys.path)")
    plain = _plain("-m", "package.module", "--every", "3")
    watched = _watched("-m", "package.module", "--every", "3")
    assert plain.out.startswith("__main__ package.module ")
    assert watched.out == plain.out


def test_another_sitecustomize_is_still_loaded():
    Path("site").mkdir()
    _write("site/sitecustomize.py", "import builtins; builtins.was_here = 'site'")
    _write("script.py", "import sys; print(was_here, sys.modules['sitecustomize'].__file__)")
    launch = _launch("script.py")
    environment = dict(launch.environment)
    environment["PYTHONPATH"] += os.pathsep + str(Path("site").absolute())
    done = _finish(launch.command, environment)
    assert done.out.split() == ["site", str(Path("site/sitecustomize.py").absolute())]


def test_flags_of_the_interpreter_are_passed_on():
    _write("script.py", "import sys; print(sys.flags.optimize, sys.stdout.write_through)")
    command = [sys.executable, "-O", "-u", "-m", "scaledot", "run", "script.py"]
    done = _finish(command, {**os.environ, "PYTHONPATH": str(SOURCE)})
    assert (done.status, done.out) == (0, "1 True\n")
    assert done.err == "scaledot: no attention found: torch was not imported\n"


def test_a_program_that_starts_python_is_accepted():
    _write("script.py", "print('hello')")
    launch = _launch("env", "python", "script.py")
    assert Path(launch.command[0]).name == "env"
    assert launch.command[1:] == ["python", "script.py"]


def test_a_program_beside_the_interpreter_is_found_without_a_path(monkeypatch, folder):
    beside = Path(sys.executable).name
    monkeypatch.setenv("PATH", str(folder))
    assert _launch(beside, "script.py").command == [sys.executable, "script.py"]


def test_a_failing_watch_leaves_the_script_alone():
    Path("torch.py").write_text("")  # scaledot cannot be imported with this torch
    _write("script.py", "import torch; print('trained')")
    done = _watched("script.py")
    assert (done.status, done.out) == (0, "trained\n")
    (line,) = done.err.splitlines()
    assert line.startswith("scaledot: not watching: ")


def test_options_reach_the_script():
    _write("script.py", "")
    options = json.loads(_launch("--replace", "--every", "5", "script.py").environment[run.OPTIONS])
    assert (options["replace"], options["every"], options["claim"]) == (True, 5, True)
    assert Path(options["store"]).match("script-*.vitals")
    assert Path(options["store"]).parent == Path.cwd()
    options = json.loads(_launch("--store", "a/b.vitals", "script.py").environment[run.OPTIONS])
    assert options["store"] == str(Path.cwd() / "a/b.vitals")
    assert (options["replace"], options["every"], options["claim"]) == (False, None, False)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "which script? type: scaledot run SCRIPT"),
        (["nowhere.py"], "there is no file nowhere.py; type: scaledot run SCRIPT"),
        (["no-such-program"], "there is no file no-such-program"),
        (["--store", "notes.txt", "script.py"], "notes.txt is not a run of scaledot"),
        (["--store", ".", "script.py"], "is a folder"),
        (["--store", "notes.txt/run.vitals", "script.py"], "notes.txt is no folder"),
    ],
)
def test_mistakes_are_named_before_anything_starts(capsys, arguments, said):
    _write("script.py", "")
    _write("notes.txt", "these are notes, and they are not to be lost")
    assert cli.main(["run", *arguments]) == 2
    assert said in capsys.readouterr().err
    assert Path("notes.txt").read_text() == "these are notes, and they are not to be lost"


@pytest.mark.parametrize("every", ["0", "-1", "x", "1.5"])
def test_a_cadence_that_is_none_is_refused(capsys, every):
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", f"--every={every}", "script.py"])
    assert ended.value.code == 2
    assert f"{every!r} is no number of steps" in capsys.readouterr().err


def test_two_runs_that_start_in_the_same_second_have_two_files(folder):
    wish = folder / "train-1.vitals"
    claimed = [name_of_its_own(wish) for _ in range(3)]
    assert [path.name for path in claimed] == [
        "train-1.vitals",
        "train-1-2.vitals",
        "train-1-3.vitals",
    ]
    assert all(path.exists() for path in claimed)


def test_second_run_on_a_store_is_told_of_a_file_of_its_own(folder, capsys):
    first, second = (
        inside.LateStore(folder / "run.vitals", claim=False, main=True) for _ in range(2)
    )
    for number, store in enumerate((first, second)):
        assert store.write([_reading("a", step) for step in range(2 + number)])
    said = capsys.readouterr().err
    assert "vitals go to run-2.vitals" in said
    assert "another run writes run.vitals now, so this one has its own file" in said
    assert "holds an earlier start" not in said
    for store, steps in ((first, 2), (second, 3)):
        store.close()
        assert [step.step for step in RunReader(store.path).steps()] == list(range(steps))


def test_a_pipe_is_no_store(folder, capsys):
    os.mkfifo("run.vitals")
    _write("script.py", "")
    assert cli.main(["run", "--store", "run.vitals", "script.py"]) == 2
    assert "a pipe, a socket or a device" in capsys.readouterr().err


THREADS = """
import os, threading
os.environ["OMP_NUM_THREADS"] = "1"
import torch
from torch.nn.functional import scaled_dot_product_attention

def train():
    weight = torch.nn.Parameter(torch.eye(8))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(30):
        query = torch.randn(1, 2, 5, 8) @ weight
        scaled_dot_product_attention(query, query, query).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

threads = [threading.Thread(target=train) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


@pytest.mark.nightly
def test_a_training_in_four_threads_is_one_run(folder):
    _write("script.py", THREADS)
    done = _watched("--every", "1", "--store", "run.vitals", "script.py")
    assert done.status == 0, done.err
    assert done.err.count("vitals go to") == 1
    assert sorted(os.listdir()) == ["run.vitals", "script.py"]
    reader = RunReader("run.vitals")
    assert int(reader.scalars("watch_cost").steps[-1]) == 119
    cost = reader.scalars("watch_cost").values
    assert cost.max() <= 1


KILLED = (
    THREADS.split("def train")[0]
    + """
import signal, time
weight = torch.nn.Parameter(torch.eye(8))
optimizer = torch.optim.SGD([weight], lr=0.1)
for _ in range(2):
    query = torch.randn(1, 2, 5, 8) @ weight
    scaled_dot_product_attention(query, query, query).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
time.sleep(0.2)
os.kill(os.getpid(), signal.SIGKILL)
"""
)


def test_a_run_that_is_killed_early_has_its_first_readings(folder):
    _write("script.py", KILLED)
    assert _watched("--store", "run.vitals", "script.py").status == -signal.SIGKILL
    assert RunReader("run.vitals").latest() is not None


def test_processes_do_not_share_a_file(folder):
    wish = folder / "run.vitals"
    assert inside.file_of(wish, None, main=True) == wish
    assert inside.file_of(wish, 0, main=False) == wish
    assert inside.file_of(wish, 3, main=True).name == "run.rank3.vitals"
    assert inside.file_of(wish, None, main=False).name == f"run.process{os.getpid()}.vitals"


def test_coverage_and_notes_are_in_the_file_while_the_script_runs(folder, capsys):
    store = inside.LateStore(folder / "run.vitals", claim=False, main=True)
    watched = [Coverage(("a",)), Coverage(("a",), ("b",)), Coverage(("a", "b"))]
    store.watch = SimpleNamespace(
        coverage_in_words=lambda: str(watched.pop(0)),
        coverage=lambda: Coverage(("a",), ("b",)),
        step_number=1,
        models=lambda: "a model",
        silent=False,
    )
    store.note("cadence", "every 3 steps")
    store.note("coverage", "too early: there is no file")
    assert not list(folder.iterdir())
    assert store.write([_reading("a")])
    assert store.write([_reading("a")])
    assert store.write([_reading("a"), _reading("b")])
    store.note("coverage", "whatever the watch says itself")
    store.close()
    assert not watched
    more = RunReader(folder / "run.vitals").attributes.more
    assert more["coverage"] == "2 of 2 attention layers watched"
    assert more["cadence"] == "every 3 steps"
    assert RunReader(folder / "run.vitals").attributes.model == "a model"
    _, account = capsys.readouterr().err.splitlines()
    assert account == (
        "scaledot: after 1 step: 1 of 2 attention layers watched; 1 layer uses unhooked matmuls: b"
    )


def test_a_file_that_cannot_be_opened_costs_one_line(folder, capsys):
    Path("notes.vitals").write_text("notes")
    store = inside.LateStore(folder / "notes.vitals", claim=False, main=True)
    assert not store.write([_reading("a")])
    assert not store.write([_reading("a")])
    store.close()
    assert capsys.readouterr().err.count("scaledot: nothing is kept: ") == 1
    assert Path("notes.vitals").read_text() == "notes"


def test_a_folder_that_cannot_be_written_is_named_before_anything_starts(capsys):
    _write("script.py", "")
    # pytest's own folders are closed to others.
    with tempfile.TemporaryDirectory() as name:
        closed = Path(name)
        (closed / "kept.vitals").touch(mode=0o444)
        closed.chmod(0o555)
        with unprivileged():
            for store in ("run.vitals", "deeper/run.vitals", "kept.vitals"):
                assert cli.main(["run", "--store", str(closed / store), "script.py"]) == 2
                assert "no right to write" in capsys.readouterr().err
        closed.chmod(0o755)


def test_a_file_that_cannot_be_written_is_not_offered(folder, capsys):
    Path("notes.txt").write_text("notes")
    store = inside.LateStore(folder / "notes.txt" / "run.vitals", claim=False, main=True)
    assert store.write([_reading("a")])
    store.close()
    assert "live view" not in capsys.readouterr().err


def test_a_file_that_holds_a_run_is_told_to_be_continued_from_0(folder, capsys):
    for number, said in ((0, False), (1, True)):
        store = inside.LateStore(folder / "run.vitals", claim=False, main=True)
        store.write([_reading("a", step) for step in range(3)])
        store.close()
        told = "run.vitals holds an earlier start, up to step 2; this one counts from 0"
        assert (told in capsys.readouterr().err) == said, number


def test_an_evaluation_after_the_last_step_is_no_step(folder, capsys):
    store = inside.LateStore(folder / "run.vitals", claim=False, main=True)
    store.write([_reading("a", 0), _reading("a", 1)])
    store.write([_reading("a", 2, "eval")])
    store.close()
    assert store.anything
    assert store.evidence(2) == "too little seen: all 2 steps were read; a trend needs 8"


def test_a_torch_that_is_interrupted_while_it_is_imported_gets_no_line():
    Path("torch.py").write_text("raise KeyboardInterrupt")
    _write("script.py", "import torch")
    plain, watched = _plain("script.py"), _watched("script.py")
    assert watched.status == plain.status
    assert "attention" not in watched.err


def _reading(layer: str, step: int = 0, phase: Phase = "train") -> Reading:
    return Reading.of(Vitals.empty((3,)), step=step, layer=layer, phase=phase)


@pytest.mark.nightly
def test_an_interpreter_or_an_executable_is_started_as_it_is(folder):
    _write("train.py", TRAIN)
    _write("go.sh", f"#!/bin/sh\nexec {sys.executable} train.py\n")
    Path("go.sh").chmod(0o755)
    for command in ([sys.executable, "train.py"], ["./go.sh"]):
        done = _watched("--store", "run.vitals", *command)
        assert done.status == 0, done.err
        assert "2 of 2 attention layers watched" in done.err
        assert [path.name for path in folder.glob("*.vitals")] == ["run.vitals"]
    _write("plain.sh", "#!/bin/sh\ntrue\n")
    with pytest.raises(ValueError, match="is not executable; type: chmod"):
        _launch("plain.sh")
    _write("train", "#!/usr/bin/env python\n" + TRAIN)
    Path("train").chmod(0o755)
    first, *_, last = _launch("train").command
    assert (first, last) == (sys.executable, "train")


@pytest.mark.parametrize("flags", [["-I"], ["-E"], ["-S"], ["-uE"], ["-W", "error", "-I"]])
def test_a_python_that_would_not_be_watched_is_refused(flags):
    _write("train.py", TRAIN)
    for before in ([], ["env", "A=1"], ["nice", "-n", "5"], ["timeout", "60"]):
        with pytest.raises(ValueError, match="this Python would not be watched"):
            _launch(*before, sys.executable, *flags, "train.py")


@pytest.mark.parametrize("flags", [["-u"], ["-W", "error"], ["-Xutf8"], ["-OB"], ["-mthis", "-I"]])
def test_other_flags_and_the_arguments_of_a_script_are_not(flags):
    _launch(sys.executable, *flags, "train.py", "-I")
    _launch("env", sys.executable, *flags, "train.py", "-I")


SHADOW = """
import {name}
assert {name}.__file__ == __file__.replace("train.py", "{name}.py"), {name}
print({name}.mine)
"""


@pytest.mark.one_case
@pytest.mark.parametrize("name", ["sqlite3", "statistics", "queue"])
@pytest.mark.parametrize("first", [True, False])
def test_a_module_named_like_one_of_pythons_is_the_scripts_alone(name, first):
    _write(f"{name}.py", "mine = 'mine'")
    shadow = SHADOW.format(name=name)
    _write("train.py", shadow + TRAIN if first else TRAIN + shadow)
    plain = _plain("train.py")
    watched = _watched("--every", "1", "--store", "run.vitals", "train.py")
    assert (watched.status, watched.out) == (plain.status, plain.out)
    if plain.status == 0:  # torch itself does without the module
        assert "2 of 2 attention layers watched" in watched.err
        assert len(list(RunReader("run.vitals").steps("train"))) == 7


PARENT = """
import multiprocessing, subprocess, sys
import torch
from torch.nn import functional as F


def attend(number=0):
    q = torch.ones(1, 1, 3, 4)
    F.scaled_dot_product_attention(q, q, q)
    return number


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, number):
        return attend(number)


if __name__ == "__main__":
    attend()
    print(sys.meta_path == before)
    helper = subprocess.run([sys.executable, "train.py"], capture_output=True, text=True)
    print(helper.returncode, helper.stderr)
    loader = torch.utils.data.DataLoader(Data(), num_workers=1, multiprocessing_context="spawn")
    print(list(loader))
"""


@pytest.mark.nightly
def test_what_a_watched_program_starts_is_not_watched(folder):
    _write("train.py", TRAIN)
    _write("parent.py", "import sys\nbefore = list(sys.meta_path)\n" + PARENT)
    plain = _plain("parent.py")
    done = _watched("--store", "run.vitals", "parent.py")
    assert plain.out.splitlines()[0] == "True"
    assert (done.status, done.out) == (0, plain.out)
    assert [path.name for path in folder.glob("*.vitals")] == ["run.vitals"]


RANKS = """
import torch
import torch.distributed as dist
from torch.nn import functional as F


def work(rank, folder):
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=2)
    q = torch.ones(1, 1, 3, 4, requires_grad=True)
    optimizer = torch.optim.SGD([q], lr=0.1)
    for _ in range(3):
        F.scaled_dot_product_attention(q, q, q).sum().backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    import os
    torch.multiprocessing.spawn(work, (os.getcwd(),), nprocs=2)
"""


@pytest.mark.nightly
def test_spawned_ranks_are_watched():
    _write("ranks.py", RANKS)
    done = _watched("--ranks", "apart", "--store", "run.vitals", "ranks.py")
    assert done.status == 0, done.err
    assert RunReader("run.vitals").layers() == {"work": 1}


@pytest.mark.nightly
def test_the_only_process_behind_a_launcher_takes_the_name(folder):
    _write("train.py", TRAIN)
    _write(
        "torchrun",
        "import subprocess, sys, torch\nsys.exit(subprocess.call([sys.executable, 'train.py']))\n",
    )
    done = _watched("--store", "run.vitals", "torchrun")
    assert done.status == 0, done.err
    assert [path.name for path in folder.glob("*.vitals")] == ["run.vitals"]
    assert done.err.startswith("scaledot: vitals go to run.vitals")


@pytest.mark.parametrize("mode", [0o000, 0o444, 0o222])
@pytest.mark.parametrize("option", ["--store", "--alarms"])
def test_a_folder_that_may_not_be_entered_is_named_before_anything_starts(capsys, option, mode):
    _write("script.py", "")
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are closed to others
        Path(name).chmod(0o777)
        closed = Path(name, "closed")
        closed.mkdir()
        (closed / "there").touch()
        closed.chmod(mode)
        with unprivileged():
            for file in ("there", "new", "deeper/new"):
                known = ["--store", str(Path(name, "run.vitals"))] if option == "--alarms" else []
                arguments = ["run", *known, option, str(closed / file), "script.py"]
                assert cli.main(arguments) == 2
                assert f"no right to write {closed}; give {option}" in capsys.readouterr().err
        closed.chmod(0o755)


def test_a_folder_that_takes_no_alarms_is_named_before_anything_starts(folder):
    (folder / "closed").mkdir(0o555)
    with (
        unprivileged(),
        pytest.raises(ValueError, match=r"no right to write .*; give --alarms FILE"),
    ):
        run._refuse_unwritable(Path("closed/alarms.jsonl"), "--alarms")


def test_alarms_into_no_folder_are_refused_at_the_start():
    with pytest.raises(ValueError, match=r"there is no folder .*; give another --alarms FILE"):
        _launch("--alarms", "nowhere/alarms.jsonl", "train.py")
