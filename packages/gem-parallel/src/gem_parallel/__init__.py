"""Will hold topology, parallel axes, the planner, sparse and dense strategies, batch balancing
and distributed checkpoints.

It registers no plugin yet: installing it changes nothing that ``gem`` does.
"""

from importlib.metadata import version

__version__ = version("gem-parallel")

__all__ = ["__version__"]
