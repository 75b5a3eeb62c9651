"""The demo (extra: gem-core[demo]): `python -m gem_core.demo` trains GEM and baselines on a real log and reports."""
