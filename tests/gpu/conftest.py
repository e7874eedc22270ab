"""The kernel tests import `oracle`, which lies beside them: pytest's importlib mode adds no directory by itself."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
