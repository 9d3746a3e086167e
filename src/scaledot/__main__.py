"""`python -m scaledot` is `scaledot`."""

import sys

from scaledot.cli import main

if __name__ == "__main__":
    sys.exit(main())
