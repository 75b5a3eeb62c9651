"""Data: schema-driven encoding, readers, the loader, profiles. Import its modules by name; they need torch."""
