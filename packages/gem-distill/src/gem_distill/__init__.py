"""Will hold knowledge distillation, the student adapter, LoopFM and Solaris representations.

It registers no plugin yet: installing it changes nothing that ``gem`` does.
"""

from importlib.metadata import version

__version__ = version("gem-distill")

__all__ = ["__version__"]
