"""All tests."""

import os
import sys

# Tests start hundreds of Python processes, and each would compile what it imports again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
