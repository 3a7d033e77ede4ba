"""One thread for every test and every process a test starts.

Two threads on a machine that something else disturbs can be forty times slower than one.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
