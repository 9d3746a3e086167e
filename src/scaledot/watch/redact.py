"""Hide what looks like a secret before it is kept: in a run's command line and in its errors.

A store is passed on: to colleagues, into an issue, onto a page. The value of `--token`,
`--hf-api-key`, `WANDB_API_KEY=`, of a login in a URL, and keys of a known form (hf_..., ghp_...)
become `***`; names stay. Tokens of text are no secrets: `--max-tokens 512` stays.
"""

import re
from collections.abc import Iterable

HIDDEN = "***"

# The last word of an option's name, or its last two.
_NAMES = {"token", "secret", "password", "passwd", "passphrase", "pwd", "credential", "credentials"}
_NAMES |= {"apikey", "auth", "authorization", "bearer", "cookie"}
_KEYS = {"api", "access", "secret", "private", "account", "auth", "encryption", "ssh"}  # before key
# A token of text, by the word before it: --max-token, --pad-token.
_OF_TEXT = {"max", "min", "num", "n", "per", "pad", "padding", "eos", "bos", "unk", "sep", "cls"}
_OF_TEXT |= {"mask", "image", "audio", "video", "start", "end", "stop", "special", "decoder"}

# A name, up to where its value begins.
_NAMED = re.compile(r"(?<!\w)([A-Za-z_][\w.-]{0,100}+)[\"']?\s*[=:]\s*[\"']?")
_VALUE = re.compile(r"[^\s\"'&,;}]+")
_LOGIN = re.compile(r"(?<=://)[^\s/@?#]+(?=@)")
_SCHEME = re.compile(r"(?i)\b(bearer|basic)\s+[\w.+/=~-]{8,}")
_KNOWN = re.compile(
    r"\b(?:hf_\w{16,}|gh[pousr]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|sk-[\w-]{16,}"
    r"|xox[abprs]-[\w-]{10,}|(?:AKIA|ASIA)[0-9A-Z]{16}|AIza[\w-]{30,}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
)


def redact(arguments: Iterable[str]) -> tuple[str, ...]:
    """Hide the secrets of a command line: in one argument, or in the one after its name."""
    found: list[str] = []
    named = False  # the argument before was the name of a secret
    for argument in arguments:
        if named and not argument.startswith("--"):
            found.append(HIDDEN)
            named = False
            continue
        found.append(redact_text(argument))
        named = argument.startswith("-") and "=" not in argument and _is_secret(argument)
    return tuple(found)


def redact_text(text: str) -> str:
    """Hide logins of URLs, values that a secret's name announces, and keys of known forms."""
    text = _LOGIN.sub(HIDDEN, text)
    text = _SCHEME.sub(rf"\1 {HIDDEN}", text)
    return _KNOWN.sub(HIDDEN, _without_values(text))


def _without_values(text: str) -> str:
    parts, end = [], 0
    for found in _NAMED.finditer(text):
        if found.start() < end or not _is_secret(found[1]):
            continue
        value = _VALUE.match(text, found.end())
        if value is not None:
            parts += [text[end : value.start()], HIDDEN]
            end = value.end()
    return "".join([*parts, text[end:]])


def _is_secret(name: str) -> bool:
    apart = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name)  # apiKey: two words
    *before, last = re.sub(r"[^A-Za-z0-9]+", " ", apart).lower().split() or [""]
    kind = before[-1] if before else ""
    if last == "token" and kind in _OF_TEXT:
        return False
    return last in _NAMES or (last == "key" and kind in _KEYS)
