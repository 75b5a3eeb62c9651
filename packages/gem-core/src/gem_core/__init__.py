"""GEM's core: protocols, plugins, data, reference ops, models, trainer and the ``gem`` command line.

Importing this package does not import torch.
"""

from importlib.metadata import version

__version__ = version("gem-core")

__all__ = ["__version__"]
