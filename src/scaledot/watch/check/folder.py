"""A folder that `model.save_pretrained` wrote: safetensors only, no network, no code of its own."""

import contextlib
import inspect
import json
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scaledot.printable import typed
from scaledot.watch.check.subject import CannotRead, Say, Subject
from scaledot.watch.check.text import read_text

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
TOKENIZERS = ("token*", "vocab*", "*.model", "*.tiktoken", "*.bpe")
LONGEST = 1024  # tokens: enough to know a head by, and seconds on a CPU
FEWEST = 8

# With these, transformers asks nobody and runs nothing that it does not ship itself.
LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


def open_folder(folder: Path, text_file: str | None, say: Say) -> Subject:
    _refuse_what_is_no_model(folder)
    _refuse_pickle(folder)
    text, source = read_text(text_file)
    say(f"loading {folder.resolve().name} ({_megabytes(folder)})")
    with _offline(), _silent(_transformers()) as transformers:
        config = _config(transformers, folder)
        tokenizer = _tokenizer(transformers, folder)
        model, made_up = _model(transformers, folder, config)
        inputs, about = _inputs(model, tokenizer, text, source)
    say(f"one forward pass over {about}")
    return Subject(model, inputs, (), about, made_up)


def _refuse_what_is_no_model(folder: Path) -> None:
    if (folder / "adapter_config.json").exists():
        raise CannotRead(
            f"{folder} holds an adapter, not a whole model; merge it first: "
            f"model.merge_and_unload().save_pretrained(FOLDER), then type: scaledot check FOLDER"
        )
    if (folder / "config.json").exists():
        return
    inside = [
        path.parent for at in ("*", "snapshots/*") for path in folder.glob(f"{at}/config.json")
    ]
    inside = [path for path in inside if _weights(path) or _pickles(path)]
    hint = (
        f"did you mean: scaledot check {typed(max(inside, key=_age))}"
        if inside
        else "give a folder that model.save_pretrained(FOLDER) wrote"
    )
    raise CannotRead(f"there is no config.json in {folder}; {hint}")


def _age(folder: Path) -> tuple[float, int, str]:
    """The largest is the newest: by its time, of equal ones by the number in its name."""
    numbers = re.findall(r"\d+", folder.name)
    time = (folder / "config.json").stat().st_mtime
    return time, int(numbers[-1]) if numbers else -1, folder.name


def _refuse_pickle(folder: Path) -> None:
    if _weights(folder):
        return
    pickles = _pickles(folder)
    if not pickles:
        raise CannotRead(
            f"there is no model.safetensors in {folder}; save the model again: "
            f"model.save_pretrained({str(folder)!r})"
        )
    old, new = str(folder), f"{str(folder).rstrip('/')}-safetensors"
    program = (
        f"from transformers import AutoModel, AutoTokenizer; "
        f"[part.from_pretrained({json.dumps(old)}).save_pretrained({json.dumps(new)}) "
        f"for part in (AutoModel, AutoTokenizer)]"
    )
    raise CannotRead(
        f"{folder} holds its weights only as {pickles[0].name}, a pickle, which can run code when "
        f"it is opened; check reads safetensors alone. If you trust whoever made it, convert it "
        f"once:\n  python -c {shlex.quote(program)}\n"
        f"then type: scaledot check {typed(new)}"
    )


def _weights(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def _pickles(folder: Path) -> list[Path]:
    return [path for pattern in PICKLES for path in sorted(folder.glob(pattern))]


def _megabytes(folder: Path) -> str:
    return f"{sum(path.stat().st_size for path in _weights(folder)) / 1e6:,.0f} MB"


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise CannotRead(
            f"a model folder is opened by transformers ({error}); type: pip install 'scaledot[hf]'"
        ) from None
    return transformers


def _config(transformers: Any, folder: Path) -> Any:
    try:
        return transformers.AutoConfig.from_pretrained(folder, **LOCAL)
    except Exception as error:
        raise CannotRead(_unreadable(transformers, folder, error)) from error


def _tokenizer(transformers: Any, folder: Path) -> Any:
    # Where there is no file, transformers makes a tokenizer that knows no word.
    some = any(path for at in TOKENIZERS for path in folder.glob(at))
    reason = ""
    try:
        if some:
            return transformers.AutoTokenizer.from_pretrained(folder, **LOCAL)
    except Exception as error:
        reason = f" that can be read ({_line(error)})"
    raise CannotRead(
        f"there is no tokenizer in {folder}{reason}; save it beside the model: "
        f"tokenizer.save_pretrained({str(folder)!r}), or, if the model reads no text, "
        f"write a function: scaledot check MODULE:FUNCTION"
    )


def _model(transformers: Any, folder: Path, config: Any) -> tuple[Any, tuple[str, ...]]:
    try:
        model, info = _load(transformers, folder, config)
    except Exception as error:
        raise CannotRead(_unreadable(transformers, folder, error)) from error
    # A pooler works on what comes out of the last layer: no head depends on it.
    missing = (name for name in info["missing_keys"] if not name.startswith("pooler."))
    return model, tuple(sorted(missing))


def _unreadable(transformers: Any, folder: Path, error: BaseException) -> str:
    return (
        f"transformers {transformers.__version__} cannot read the model in {folder}: "
        f"{_line(error)}\nif it needs code of its own, which check never runs, write a "
        f"function that builds it: scaledot check MODULE:FUNCTION"
    )


def _load(transformers: Any, folder: Path, config: Any) -> tuple[Any, dict[str, Any]]:
    """With torch's attention, or the model's own where it knows no other.

    Named here, for a config may name a kernel that transformers would fetch and run.
    """
    options = {**LOCAL, "config": config, "use_safetensors": True, "output_loading_info": True}
    try:
        return transformers.AutoModel.from_pretrained(folder, attn_implementation="sdpa", **options)
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise
    return transformers.AutoModel.from_pretrained(folder, attn_implementation="eager", **options)


def _inputs(model: Any, tokenizer: Any, text: str, source: str) -> tuple[dict[str, Any], str]:
    limit = min(LONGEST, _longest(model, tokenizer))
    whole = len(tokenizer(text, verbose=False)["input_ids"])
    inputs = tokenizer(text, truncation=True, max_length=limit, return_tensors="pt")
    tokens = inputs["input_ids"].shape[-1]
    if tokens < FEWEST:
        raise CannotRead(
            f"{source} is {tokens} tokens long; a head shows itself over a paragraph: give at "
            f"least {FEWEST}"
        )
    unknown = int((inputs["input_ids"] == tokenizer.unk_token_id).sum())
    if tokenizer.unk_token_id is not None and unknown > tokens / 2:
        raise CannotRead(
            f"the tokenizer does not know {unknown} of {tokens} tokens of {source}; give a text in "
            f"its language with --text, or save the tokenizer that belongs to the model"
        )
    takes = inspect.signature(model.forward).parameters
    given = {name: value for name, value in inputs.items() if name in takes}
    if model.config.is_encoder_decoder and "decoder_input_ids" in takes:
        given["decoder_input_ids"] = inputs["input_ids"]
    if "use_cache" in takes:
        given["use_cache"] = False
    cut = f"the first {tokens} of {whole:,} tokens" if tokens < whole else f"{tokens} tokens"
    return given, f"{cut} of {source}"


def _longest(model: Any, tokenizer: Any) -> int:
    """Positions that the model has; a tokenizer that knows no limit says 1e30."""
    text = model.config.get_text_config()
    limits = [getattr(text, "max_position_embeddings", None) or LONGEST, tokenizer.model_max_length]
    for name, module in model.named_modules():
        padding = getattr(module, "padding_idx", None)
        if name.endswith("position_embeddings") and padding is not None:  # RoBERTa counts from it
            limits.append(module.num_embeddings - padding - 1)
    return int(min(limits))


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """For libraries that are imported now and read it once."""
    names = ("HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _silent(transformers: Any) -> Iterator[Any]:
    """Its bars and reports would be in between ours; what matters of them, check says itself."""
    logging = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield transformers
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _line(error: BaseException) -> str:
    """transformers' errors fill a screen; the first sentence says what it is."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
