"""python -m benchmarks.kernels"""

import sys

from benchmarks.kernels.configs import main

sys.exit(main())
