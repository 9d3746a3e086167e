"""The command line of many.py; worker processes import that module, not this one."""

import sys

from fuzz.many import main

sys.exit(main())
