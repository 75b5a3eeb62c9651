"""GEM's core: protocols, plugins, data, reference ops, models, trainer and the ``gem`` command line.

Importing this package does not import torch.
"""

__all__ = ["__version__"]


def __getattr__(name: str) -> str:
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import version  # slow to import, and the command line begins here

    return version("gem-core")
