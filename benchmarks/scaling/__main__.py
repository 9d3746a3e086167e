"""python -m benchmarks.scaling"""

import sys

from benchmarks.scaling.page import main

sys.exit(main())
