"""A plugin of GEM that is not GEM's: a JSON-lines reader, a two-layer model, and a backend of the op seed_attention."""
