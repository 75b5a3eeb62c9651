"""The demo (extra: gem-core[demo]): `python -m gem_core.demo` trains GEM and its baselines on a real log and writes a report."""
