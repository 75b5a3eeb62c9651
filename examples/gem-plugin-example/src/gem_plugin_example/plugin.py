"""What the plugin offers. GEM imports this module to list names, so it imports nothing heavy itself."""

from gem_core.plugins import Register, hookimpl


@hookimpl
def gem_contract() -> int:
    """The contract that this was written for; a gem-core of another one refuses the plugin with a message."""
    return 1


@hookimpl
def gem_register_reader(register: Register) -> None:
    """`data.reader: json-lines` in a recipe."""
    register("json-lines", "gem_plugin_example.reader:JsonLinesReader", "One JSON object a line.")


@hookimpl
def gem_register_model(register: Register) -> None:
    """`model: two-layer` in a recipe."""
    register("two-layer", "gem_plugin_example.model:TwoLayer", "Pooled events and two linear maps.")


@hookimpl
def gem_register_op(register: Register) -> None:
    """`ops: {seed_attention: example}` in a recipe; the name is "<op>:<backend>"."""
    register("seed_attention:example", "gem_plugin_example.backend:SegmentSeedAttention")
