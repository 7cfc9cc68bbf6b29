"""YAML files that users write: reading, `key.path=value` overrides, and messages that name what is wrong.

Called by everything that has a schema of its own for a file (recipes, scenarios). Imports nothing heavy.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from paceline.config import describe_limit
from paceline.errors import ConfigError

_Model = TypeVar("_Model", bound=BaseModel)


class _Loader(yaml.SafeLoader):
    """Safe YAML in which 1e-6 is a number and no key stands twice, as in YAML 1.2; PyYAML takes the first for text, and
    the last value of a key.
    """

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if (name := (key.tag, key.value)) in seen:
                raise yaml.MarkedYAMLError(problem=f"{key.value} stands twice", problem_mark=key.start_mark)
            seen.add(name)
        return node


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def read_yaml(path: Path, kind: str, example: str) -> dict[str, Any]:
    """The mapping in a file. kind: what the messages call it; example: a file of that kind.

    Raises ConfigError for a file that cannot be read, is not YAML, or holds no mapping.
    """
    try:
        fields = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read the {kind} {path}: {reason}; see {example}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{kind} {path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{kind} {path} must be a mapping of keys to values, see {example}")
    return fields


def apply_override(fields: dict[str, Any], override: str, option: str = "--set") -> None:
    """Carry out `key.path=value`, the value being YAML. Raises ConfigError for anything else."""
    name, equals, text = override.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"{option} {override}: write it as key.path=value, such as batch.prompts=4")
    try:
        value = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"{option} {override}: the value is not YAML: {' '.join(str(error).split())}"
        ) from error
    holder = fields
    for key in keys[:-1]:
        if holder.get(key) is None:
            holder[key] = {}
        inner = holder[key]
        if not isinstance(inner, dict):
            raise ConfigError(f"{option} {override}: {key} is the value {inner!r}, not a section")
        holder = inner
    holder[keys[-1]] = value


def validate(model: type[_Model], fields: dict[str, Any], where: str) -> _Model:
    """The model of these fields. Raises ConfigError that names `where`, every refused key, its value and the remedy."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise ConfigError(
            f"{where}: {'; '.join(_explain(item, model) for item in error.errors())}"
        ) from error


def _explain(item: Any, model: type[BaseModel]) -> str:
    where = ".".join(map(str, item["loc"])) or "the file"
    if item["type"] == "extra_forbidden":
        return f"unknown key {where} = {item['input']!r}{_nearest(item['loc'], model)}"
    if item["type"] == "missing":
        return f"{where} is missing: add it"
    return f"{where} = {item['input']!r}: {describe_limit(item)}"


def _nearest(location: tuple[int | str, ...], model: type[BaseModel]) -> str:
    """`; did you mean X?`, from all keys of the model that end alike, or the keys that the section has."""
    known = _known_keys(model)
    siblings = [key for key in known if key.split(".")[:-1] == [str(part) for part in location[:-1]]]
    name = str(location[-1])
    near = difflib.get_close_matches(name, [key.split(".")[-1] for key in siblings], n=1)
    if near:
        return f"; did you mean {'.'.join([*map(str, location[:-1]), near[0]])}?"
    elsewhere = [key for key in known if key.split(".")[-1] == name]
    if elsewhere:
        return f"; it belongs to {elsewhere[0]}"
    return f"; there are: {', '.join(key.split('.')[-1] for key in siblings)}" if siblings else ""


def _known_keys(section: type[BaseModel], prefix: str = "") -> list[str]:
    keys: list[str] = []
    for name, field in section.model_fields.items():
        keys.append(prefix + name)
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                keys += _known_keys(kind, f"{prefix}{name}.")
    return keys
