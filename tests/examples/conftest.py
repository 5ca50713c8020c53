"""The examples are scripts: their folder is put on the path, as Python does when it runs one."""

import sys

from launch import ROOT

sys.path.insert(0, str(ROOT / "examples"))
