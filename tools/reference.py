"""Write docs/reference/*.md from the models that validate schemas and recipes: `python tools/reference.py`.

tests/test_reference.py fails while the files differ from what this makes.
"""

import inspect
import json
import sys
import types
import typing
from pathlib import Path
from typing import Any

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from gem_core import recipe, schema
from gem_core.plugins import default_registry

FOLDER = Path(__file__).parent.parent / "docs/reference"
MADE = "<!-- Made by tools/reference.py from docstrings and fields: change these, then run it. -->\n"
LIMITS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<", "min_length": "length >=", "max_length": "length <="}
PARTS = ("reader", "batcher", "model", "precision", "embedding", "loss", "metric", "strategy", "tracker", "callback")


def type_name(annotation: Any, seen: list[type[BaseModel]]) -> str:
    """A type as a reader of YAML would call it; models in it are added to `seen`."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return type_name(arguments[0], seen)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(type_name(a, seen) for a in arguments))
    if origin is typing.Literal:
        return " or ".join(json.dumps(a) for a in arguments)
    if origin is dict:
        return f"mapping of names to {type_name(arguments[1], seen)}"
    if origin in (list, tuple):
        return f"list of {type_name(arguments[0], seen)}"
    if isinstance(annotation, type) and issubclass(annotation, recipe._Component):
        return "a part"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        if annotation not in seen:
            seen.append(annotation)
        return annotation.__name__
    plain = {str: "text", int: "integer", float: "number", bool: "true or false", type(None): "null", Any: "anything"}
    return plain.get(annotation, getattr(annotation, "__name__", str(annotation)))


def default(field: FieldInfo) -> str:
    """The default as it would be written."""
    if field.is_required():
        return "required"
    value = to_jsonable_python(field.get_default(call_default_factory=True), by_alias=True)
    if isinstance(value, dict) and set(value) == {"name"}:
        value = value["name"]
    if isinstance(value, list):
        value = [v["name"] if isinstance(v, dict) and set(v) == {"name"} else v for v in value]
    text = json.dumps(value)
    return f"`{text}`" if len(text) <= 40 else "its own defaults"


def table(model: type[BaseModel], seen: list[type[BaseModel]]) -> list[str]:
    """The docstring of a model and a table of its fields."""
    if not model.model_fields:
        return ["No options.", ""]
    own = vars(model).get("__doc__")
    lines = [inspect.cleandoc(own), ""] if own else []
    lines += ["| key | value | default |", "|---|---|---|"]
    for name, field in model.model_fields.items():
        limits = [
            f"{sign} {getattr(limit, key)}"
            for limit in field.metadata
            for key, sign in LIMITS.items()
            if isinstance(limit, annotated_types.BaseMetadata) and getattr(limit, key, None) is not None
        ]
        value = ", ".join([type_name(field.annotation, seen), *limits])
        note = f"; {field.description}" if field.description else ""
        lines.append(f"| `{field.alias or name}` | {value}{note} | {default(field)} |".replace("\n", " "))
    return [*lines, ""]


def tables(models: list[type[BaseModel]], level: str) -> list[str]:
    """A section for each model and for those that they name."""
    lines, seen = [], models
    for model in seen:  # grows
        lines += [f"{level} {model.__name__}", "", *table(model, seen)]
    return lines


def schema_page() -> str:
    """What a schema may say."""
    seen: list[type[BaseModel]] = [schema.Fitted]  # learned, not written
    lines = ["# Schema", "", MADE, *table(schema.Schema, seen)]
    lines += tables([model for model in seen if model is not schema.Fitted], "##")
    return "\n".join(lines)


def recipe_page() -> str:
    """What a recipe may say, and the options of the built-in parts."""
    intro = (
        "A part is `{name: ..., option: ...}`, or its bare name; options without a name are those of the default part."
    )
    lines = ["# Recipe", "", MADE, intro, "", *tables([recipe.Recipe], "##"), "## Built-in parts", ""]
    within: list[type[BaseModel]] = []
    for kind in PARTS:
        for name, entry in sorted(default_registry().entries[kind].items()):
            if entry.plugin == "core":
                lines += [f"### {kind} `{name}`", "", *table(entry.load_component().Config, within)]
    return "\n".join([*lines, "## Options within those of parts", "", *tables(within, "###")])


PAGES = {"schema.md": schema_page, "recipe.md": recipe_page}


def main() -> int:
    """Write the pages."""
    FOLDER.mkdir(exist_ok=True)
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
