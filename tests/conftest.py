"""One thread for every test and every process a test starts, and a Ctrl-C that they can hear.

Two threads on a machine that something else disturbs can be forty times slower than one. A shell
starts what it sends to the background deaf to SIGINT, and all its children would inherit that.
"""

import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
