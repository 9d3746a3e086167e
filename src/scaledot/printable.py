"""Show text from strangers without letting it act on a terminal, a log or a page.

Names of layers, command lines, paths and exceptions come out of files that others wrote. A control
character in them can write to the clipboard, clear the screen or forge a line; a direction override
can show a word backwards. Each such character is replaced by one visible character: the length of a
text stays, so what is laid out for its width still fits.
"""

import logging
import re
import shlex
import sys
import traceback

# C1 controls, then everything of Unicode's category Cf (direction marks and overrides, zero width,
# tags), line and paragraph separators, fillers that draw nothing, and halves of a character.
_INVISIBLE = (
    "\x80-\x9f\u00ad\u034f\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u115f\u1160\u17b4\u17b5"
    "\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff\uffa0\ufff0-\ufffb"
    "\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    "\U000e0000-\U000e0fff\ud800-\udfff"
)
_HIDDEN = re.compile(f"[\x00-\x08\x0b-\x1f\x7f{_INVISIBLE}]")
_HIDDEN_OR_BREAK = re.compile(f"[\x00-\x1f\x7f{_INVISIBLE}]")


def printable(text: str) -> str:
    """Replace every control and invisible character by a visible one; keep newlines and tabs."""
    return _HIDDEN.sub(_picture, text)


def one_line(text: str) -> str:
    """Replace newlines and tabs, too: for a name, a path or a message, which is one line."""
    return _HIDDEN_OR_BREAK.sub(_picture, text)


def typed(path: object) -> str:
    """Quote a path so that a shell takes it as one file, also one that begins with a dash."""
    name = str(path)
    name = f"./{name}" if name.startswith("-") else name
    if _HIDDEN_OR_BREAK.search(name):  # bash, zsh and ksh read bytes in this form
        raw = name.encode("utf-8", "surrogateescape")
        plain = (chr(b) if 0x20 <= b < 0x7F and b not in b"'\\" else f"\\x{b:02x}" for b in raw)
        return f"$'{''.join(plain)}'"
    return shlex.quote(name)


def complain(program: str, *lines: object) -> None:
    """Print a message of a command on standard error, each argument as one line."""
    text = "\n".join(one_line(str(line)) for line in lines)
    print(f"{program}: {text}", file=sys.stderr, flush=True)


def make_visible(logger: logging.Logger | logging.Handler) -> None:
    """Let this logger or handler write no control character, whatever an exception says."""
    if not any(isinstance(one, _Visible) for one in logger.filters):
        logger.addFilter(_Visible())


class _Visible(logging.Filter):
    """Changes only those records that hold such a character."""

    def filter(self, record: logging.LogRecord) -> bool:
        try:
            message = record.getMessage()
            if _HIDDEN.search(message):
                record.msg, record.args = printable(message), ()
            if record.exc_info and record.exc_info[1] and not record.exc_text:
                error = "".join(traceback.format_exception(record.exc_info[1])).rstrip("\n")
                if _HIDDEN.search(error):
                    record.exc_text = printable(error)
        except Exception:  # such as an exception that has no words: logging itself says so
            return True
        return True


def _picture(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code < 0x20:
        return chr(0x2400 + code)  # Unicode's pictures of the C0 controls
    return "␡" if code == 0x7F else "\ufffd"
