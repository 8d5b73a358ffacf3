"""`python -m ck_patch`: the console script for where Scripts or bin is not on PATH."""

import sys

from ck_patch.cli import main

sys.exit(main())
