"""The text that a model reads while it is checked."""

import sys
from pathlib import Path

from scaledot.watch.check.subject import CannotRead

# Plain prose, with names that come back and sentences that lean on each other: heads that look for
# a position, for a repetition or for nothing in particular all find something to do here.
PARAGRAPH = """\
When the harbour froze in the second week of January, the ferry to the islands stopped, and Marta
Lindqvist, who had carried the post for eleven years, bought a pair of long skates and a sledge.
The first crossing took her four hours. She went slowly, because the ice near the lighthouse was
dark and thin, and because the sledge, which was loaded with letters, two sacks of flour and a box
of medicine for the doctor, kept sliding into her heels. "You could have waited for the thaw," the
doctor said when she arrived. "The thaw does not read letters," Marta answered, and she went on to
the next house. By March everybody on the islands knew the sound of her skates. Children ran down
to the shore when they heard it; old people put the kettle on. Nobody asked any more why she did
not wait. When the ice broke at last and the ferry came back, the captain offered to take the post
again, as he had always done. Marta looked at the open water for a while, then at her skates,
which she had sharpened the evening before. "In January," she said, "you may ask me again." The
captain laughed, but the following winter he did ask, and the winter after that, until the skates
hung in the lighthouse beside a small brass plate with her name and the number of the crossings:
one hundred and six.
"""


def read_text(file: str | None) -> tuple[str, str]:
    """The text, and what to call it. None: the paragraph above; "-": standard input."""
    if file is None:
        return " ".join(PARAGRAPH.split()), "the paragraph that comes with scaledot"
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise CannotRead(f"{file} is no text in UTF-8; give a plain text file to --text") from None
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise CannotRead(
            f"the text {file} cannot be read ({reason}); give a plain text file to --text, or "
            f"leave it out for the paragraph that comes with scaledot"
        ) from None
    if not text.strip():
        raise CannotRead(f"the text {file} is empty; give a paragraph or more to --text")
    return text, "standard input" if file == "-" else file
