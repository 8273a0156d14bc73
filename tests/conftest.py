"""Two workers share the cores: neither starts threads of its own, in numpy and torch or in the processes of a test.

Set before torch and numpy are imported, which read it once. verl's own processes are given their threads by CPU mode.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
