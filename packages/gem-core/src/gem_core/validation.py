"""Files and options that users write, checked: YAML read without surprises, pydantic's errors in our words."""

from __future__ import annotations

import types
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from gem_core.errors import ConfigError, looked_for, nearest

Loc = tuple[int | str, ...]


def read_yaml(path: Path, what: str) -> dict[str, Any]:
    """A YAML or JSON file that holds a mapping; `what` is how messages call it ("recipe demo.yaml").

    Raises:
        ConfigError: not readable, not YAML, not a mapping, or a key given twice (YAML alone takes the last).
    """
    try:
        value = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys)
    except OSError as error:
        hint = looked_for(path) if isinstance(error, FileNotFoundError) else ""
        raise ConfigError(f"{what}: cannot be read: {error.strerror}{hint}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError(f"{what}: not valid YAML: {place}{error.problem}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{what}: expected a mapping of options, found {_kind(value)}")
    return value


class _UniqueKeys(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key in seen and key != "<<":
                raise yaml.constructor.ConstructorError(None, None, f'key "{key}" is given twice', key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def explain(
    error: ValidationError,
    model: type[BaseModel],
    where: str,
    path: Loc = (),
    of: str = "",
    overrides: Mapping[Loc, str] | None = None,
) -> str:
    """One line per fault: `recipe demo.yaml: trainer.epochs: expected a valid integer, found 'x'`.

    Args:
        where: the file or object, what the message begins with.
        path: keys that lead from there to `model`.
        of: what `model` configures, if not the whole (`model "kunlun"`).
        overrides: the keys that came from the command line, and the text that set each: blamed in place of `where`.
    """
    lines: dict[tuple[str, Loc], list[str]] = {}
    for fault in error.errors():
        steps, valid = _walk(model, fault["loc"])
        full = (*path, *steps)
        lines.setdefault((blame(full, where, overrides), full), []).append(_say(fault, full, valid, of))
    out = []
    for (begin, _), said in lines.items():
        # The branches of one union fail at one place: the first says where, the others only what else would do.
        rest = [text.partition(": ")[2].partition(", found ")[0].removeprefix("expected ") for text in said[1:]]
        first, comma, found = said[0].partition(", found ")
        out.append(f"{begin}: {' or '.join([first, *rest])}{comma}{found}")
    return "\n".join(out)


def blame(path: Loc, where: str, overrides: Mapping[Loc, str] | None = None) -> str:
    """Who set what is at `path`: the last override that touched it, else `where`."""
    given = (overrides or {}).items()
    blamed = [text for key, text in given if key[: len(path)] == path or path[: len(key)] == key]
    return f'override "{blamed[-1]}"' if blamed else where


def _walk(model: Any, loc: Loc) -> tuple[Loc, list[str]]:
    """The keys of an error's place without pydantic's union tags, and the valid keys at its last mapping."""
    steps: list[int | str] = []
    valid: list[str] = []
    current: Any = model
    for step in loc:
        current, tagged = _unwrap(current)
        if step == "[key]":  # the key itself is at fault, and already the last step
            continue
        if tagged:
            branches = [a for a in get_args(current) if a is not type(None)]
            named = [b for b in branches if getattr(_unwrap(b)[0], "__name__", None) == step]
            current = named[0] if named else None
            continue
        steps.append(step)
        fields = getattr(current, "model_fields", None)
        if fields is None:
            arguments = get_args(current)
            current = arguments[-1] if arguments else None
            valid = []
        else:
            by_name = {field.alias or name: field for name, field in fields.items()}
            valid = list(by_name)
            current = by_name[str(step)].annotation if step in by_name else None
    return tuple(steps), valid


def _unwrap(annotation: Any) -> tuple[Any, bool]:
    """Without `Annotated` and `| None`; and whether a union of several is left, whose branch pydantic's loc tags."""
    while True:
        if get_origin(annotation) is Annotated:
            annotation = get_args(annotation)[0]
            continue
        if get_origin(annotation) not in (Union, types.UnionType):
            return annotation, False
        branches = [a for a in get_args(annotation) if a is not type(None)]
        if len(branches) > 1:
            return annotation, True
        annotation = branches[0]


def _say(fault: Any, full: Loc, valid: list[str], of: str) -> str:
    place = ".".join(str(step) for step in full)
    kind, found = fault["type"], fault.get("input")
    message: str = fault["msg"]
    for_what = f" of {of}" if of else ""
    if kind == "extra_forbidden":
        return f'unknown key "{place}"{for_what}{nearest(str(full[-1]), valid)}'
    if kind == "missing":
        return f'missing key "{place}"{for_what}'
    if kind == "value_error":
        return (f"{place}: " if place else "") + message.removeprefix("Value error, ")
    place = f"{place}: " if place else ""
    if kind in ("model_type", "dict_type"):
        return f"{place}expected a mapping of options, found {_show(found)}"
    if kind == "too_short":
        return f"{place}expected at least {fault['ctx']['min_length']} item, found {_show(found)}"
    expected = message.removeprefix("Input should be ").partition(", unable to")[0]
    if expected == message:
        return f"{place}{message[0].lower()}{message[1:]}, found {_show(found)}"
    if kind in ("greater_than", "greater_than_equal", "less_than", "less_than_equal"):
        expected = f"a value {expected}"
    return f"{place}expected {expected}, found {_show(found)}"


def _show(found: object) -> str:
    text = repr(found)
    return text if len(text) <= 80 else text[:77] + "..."


def _kind(value: object) -> str:
    return "nothing" if value is None else type(value).__name__
