"""Open the browser at the lab's address without showing the token to other users.

A command line can be read by everybody on the machine (`ps`), and the address with its token would
stand in the browser's. So the browser is given a file that its owner alone can read, which leads on
to the address.
"""

import contextlib
import html
import os
import tempfile
import threading
import webbrowser
from collections.abc import Iterator
from pathlib import Path

PAGE = """<!doctype html>
<meta charset="utf-8"><meta name="referrer" content="no-referrer">
<meta http-equiv="refresh" content="0; url={address}">
<title>scaledot lab</title><a href="{address}">Open the lab</a>
"""


@contextlib.contextmanager
def opened(address: str) -> Iterator[None]:
    """Open the page now, and remove the file that leads to it at the end."""
    with tempfile.TemporaryDirectory(prefix="scaledot-lab-") as folder:  # of mode 0700
        path = Path(folder, "open.html")
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(PAGE.format(address=html.escape(address)))
        # In a thread: a browser in a terminal returns when it is closed.
        threading.Thread(target=webbrowser.open, args=(path.as_uri(),), daemon=True).start()
        yield
